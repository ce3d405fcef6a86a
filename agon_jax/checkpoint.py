"""What a run needs to go on as if it had never stopped, kept with Orbax.

A checkpoint after `step` optimizer steps holds the train states (adapters, optimizer, counters; the
base is not in it) and a small JSON record: data position, seed and running totals. Sampling keys
are derived from seed, step and problem, so they need no state of their own.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree


class Checkpoints:
    """The checkpoints of one run under `directory`, newest kept; saving is asynchronous."""

    def __init__(self, directory: Path, keep: int):
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
        )

    def save(self, step: int, states: PyTree, record: dict[str, Any]) -> None:
        """Saves in the background; an error of the previous save is raised here."""
        with jax.transfer_guard("allow"):
            self._manager.check_for_errors()
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    states=ocp.args.StandardSave(states), record=ocp.args.JsonSave(record)
                ),
                force=True,
            )

    def restore_latest(self, states: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
        """(step, states, record) of the newest checkpoint; (0, `states`, {}) where there is none.

        What is restored has the shapes, dtypes and shardings of `states`. ValueError for a
        checkpoint of another rank, policy count or model: it names a leaf and both shapes.
        """
        step = self._manager.latest_step()
        if step is None:
            return 0, states, {}
        self._check_shapes(step, states)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
        with jax.transfer_guard("allow"):
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    states=ocp.args.StandardRestore(target), record=ocp.args.JsonRestore()
                ),
            )
        return step, restored["states"], restored["record"]

    def _check_shapes(self, step: int, states: PyTree) -> None:
        directory = Path(self._manager.directory) / str(step)
        tree = ocp.StandardCheckpointHandler().metadata(directory / "states").tree
        stored = {leaf.name: tuple(leaf.shape) for leaf in jax.tree.leaves(tree)}
        wanted = {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
            for path, leaf in jax.tree_util.tree_flatten_with_path(states)[0]
        }
        for name in sorted(stored.keys() | wanted.keys()):
            if stored.get(name) != wanted.get(name):
                raise ValueError(
                    f"{directory}: {name} is {stored.get(name, 'missing')} there and"
                    f" {wanted.get(name, 'missing')} in this run: it was saved with another model,"
                    " lora.rank, lora.targets, model.train or method.policies"
                )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        self._manager.close()
