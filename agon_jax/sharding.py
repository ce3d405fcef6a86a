"""The mesh of the update, and where every array of it lies.

Each array axis has a logical name, RULES says which mesh axes split it. An axis that its mesh axes
do not divide stays whole. Batches are split over data and fsdp, a base (and what is trained in its
shape) over fsdp and tensor; adapters are small and lie whole on every device.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from agon_jax.config import MeshConfig

RULES: dict[str, tuple[str, ...]] = {
    "policy": (),
    "batch": ("data", "fsdp"),
    "layer": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
}

# Logical axes of the parameters, by the name of their module or their own. Under "layers" they
# are preceded by the axis of the scanned layers.
AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("vocab", "embed"),
    "lm_head": ("vocab", "embed"),
    "q_proj": ("embed", "heads", "head_dim"),
    "k_proj": ("embed", "kv_heads", "head_dim"),
    "v_proj": ("embed", "kv_heads", "head_dim"),
    "o_proj": ("heads", "head_dim", "embed"),
    "gate_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
}
WHOLE = ("scale", "a", "b")  # parameters that lie whole on every device: norms and adapters


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (data, fsdp, tensor) over `devices`, all of them by default.

    Axis types are Auto: under Explicit ones, jax.make_mesh's default, a plain embedding gather
    is an error. Every host must hold the same whole number of batch shards, as its rollouts
    never leave it.
    """
    devices = jax.devices() if devices is None else list(devices)
    fixed = config.fsdp * config.tensor
    data = config.data or len(devices) // fixed
    if data * fixed != len(devices) or data == 0:
        raise ValueError(
            f"mesh.data = {config.data}, mesh.fsdp = {config.fsdp}, mesh.tensor = {config.tensor}:"
            f" must multiply to the number of devices, {len(devices)} (data = 0 takes what is left)"
        )
    hosts = len({device.process_index for device in devices})
    if data * config.fsdp % hosts:
        raise ValueError(
            f"mesh.tensor = {config.tensor}: a host has {len(devices) // hosts} devices, and"
            " mesh.tensor must divide that"
        )
    axes = ("data", "fsdp", "tensor")
    shape = (data, config.fsdp, config.tensor)
    return jax.make_mesh(shape, axes, (AxisType.Auto,) * len(axes), devices=devices)


def batch_shards(mesh: Mesh) -> int:
    """Parts that the rows of a batch are split into."""
    return _ways(mesh, RULES["batch"])


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of every leaf of a Batch: [policy, batch, ...]."""
    return NamedSharding(mesh, _spec(mesh, ("policy", "batch"), (0, 0)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def tree_shardings(tree: PyTree, mesh: Mesh, leading: tuple[str, ...] = ()) -> PyTree:
    """A sharding for each leaf of a tree of parameters, or of an optimizer state in their shape.

    A leaf is known by the names on its path. `leading` names axes before those of the parameters:
    ("policy",) for a stack. Leaves may be shapes only (ShapeDtypeStruct).
    """

    def leaf_sharding(path, leaf) -> NamedSharding:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        if not names or names[-1] in WHOLE:  # no name: the optimizer's counters
            return replicated(mesh)
        name = names[-2] if names[-1] == "kernel" else names[-1]
        if name not in AXES:
            raise KeyError(f"sharding.AXES has no axes for the parameter {'/'.join(names)}")
        axes = leading + (("layer",) if "layers" in names else ()) + AXES[name]
        return NamedSharding(mesh, _spec(mesh, axes, leaf.shape))

    return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def place(tree: PyTree, mesh: Mesh, leading: tuple[str, ...] = ()) -> PyTree:
    """The tree on the devices of the mesh, as tree_shardings says; all hosts hold equal values."""
    return jax.device_put(tree, tree_shardings(tree, mesh, leading))


def _spec(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    if len(axes) != len(shape):
        raise ValueError(f"an array of shape {shape} cannot have the axes {axes}")
    split = (
        RULES[axis] if size % _ways(mesh, RULES[axis]) == 0 else ()
        for axis, size in zip(axes, shape, strict=True)
    )
    return PartitionSpec(*(names or None for names in split))


def _ways(mesh: Mesh, names: tuple[str, ...]) -> int:
    return int(np.prod([mesh.shape[name] for name in names]))
