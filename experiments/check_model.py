"""Checks that a Qwen3 checkpoint computes here what it computes in transformers.

    python experiments/check_model.py DIR                     # against transformers, needs torch
    python experiments/check_model.py DIR --write FILE.npz    # and keeps what that computed
    python experiments/check_model.py DIR --golden FILE.npz   # against such a file

DIR is a Hugging Face directory: config.json and safetensors. Compared are the logits with either
padding, a greedy continuation from the cache, and the input of every layer, in float32; the first
layer that is off says where to look. Memory: 4 bytes a parameter, one model after the other. Exit
code: 0 when all agree, 1 when something is off, 2 for what cannot be read.
"""

import argparse
import functools
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from agon_jax.config import SettingError
from agon_jax.models import convert
from agon_jax.models.qwen3 import (
    Block,
    Qwen3,
    Qwen3Config,
    decode,
    init_cache,
    layer,
    unstack_cache,
    widen_cache,
)
from experiments.golden import Golden, pad, positions_of, transformers_golden
from experiments.settings import refusing

FULL = {  # part -> its arrays in a golden, the logits last
    "logits, right padding": ("ids", "mask", "pos", "logits"),
    "logits, left padding": ("lids", "lmask", "lpos", "llogits"),
}
GREEDY = {
    "greedy, cached": ("gen_prompt", "gen_ids", "gen_logits"),
    "greedy, cached, batch": ("bgen_lids", "bgen_lmask", "bgen_ids", "bgen_logits"),
}
PARTS = FULL | GREEDY
TOKENS = ("ids", "lids", "gen_prompt", "gen_ids", "bgen_lids", "bgen_ids")


class Model(NamedTuple):
    """A checkpoint as it is run here: in float32, on one device."""

    lm: Qwen3
    variables: Any


class Part(NamedTuple):
    """How far one part of the model is from the reference."""

    name: str
    delta: float  # max |ours - reference|
    bound: float  # what it may be
    tokens: str = "-"  # greedy ones that are the reference's, of how many
    astray: bool = False  # a greedy token differs where the reference was not in doubt

    @property
    def agrees(self) -> bool:
        return self.delta <= self.bound and not self.astray  # nan does not


@refusing
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="config.json and safetensors")
    parser.add_argument(
        "--golden", type=Path, metavar="FILE.npz", help="the reference (default: transformers)"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE.npz", help="where to keep what transformers computes"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="X",
        help="a part may be off by X times the standard deviation of its reference values, or by X"
        " where that is below 1 (default: %(default)g; sound float32 is off by 1e-5 or so, a wrong"
        " computation by 0.1 and more)",
    )
    args = parser.parse_args(arguments)
    if not args.tolerance > 0:
        parser.error(f"--tolerance {args.tolerance:g}: must be more than 0")
    if args.golden and args.write:
        parser.error("--write keeps what transformers computes: leave --golden away")
    convert.read_config(args.directory)  # what is no Qwen3 is refused before minutes are spent
    golden = read_golden(args.golden) if args.golden else transformers_golden(args.directory)
    if args.write:
        np.savez_compressed(args.write, allow_pickle=False, **golden)
    config, params = convert.load(args.directory, "float32")
    check_golden(golden, config)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    tied = "tied" if config.tie_embeddings else "untied"
    print(f"{args.directory}: {config.num_layers} layers, {count:,} parameters, {tied}")
    model = Model(Qwen3(config), jax.device_put({"params": params}))
    parts = list(compare(model, golden, args.tolerance))
    Console().print(part_table(parts))
    wrong = [part.name for part in parts if not part.agrees]
    print(f"off: {', '.join(wrong)}" if wrong else "all parts agree")
    return 1 if wrong else 0


def read_golden(path: Path) -> Golden:
    """The arrays of an .npz file."""
    if not path.is_file():
        raise SettingError(f"--golden {path}: is missing")
    try:
        with zipfile.ZipFile(path), np.load(path) as file:
            return dict(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise SettingError(f"--golden {path}: is not a whole .npz file: {error}") from error


def check_golden(golden: Golden, config: Qwen3Config) -> None:
    """SettingError where there is nothing to compare, or not what `config` could be held to."""
    needs = {names[-1]: names for names in PARTS.values() if names[-1] in golden}
    needs |= {name: ("gen_prompt",) for name in golden if name.startswith("hidden_")}
    if not needs:
        wanted = ", ".join(names[-1] for names in PARTS.values())
        raise SettingError(f"the golden has none of {wanted}, hidden_0 ...: nothing to compare")
    for part, names in needs.items():
        for name in names:
            if name not in golden:
                raise SettingError(f"the golden has {part}, but not the {name} it goes with")
    for names in FULL.values():
        shapes = [golden[name].shape for name in names if names[-1] in golden]
        if shapes and shapes != [*[shapes[0]] * 3, (*shapes[0], *shapes[3][-1:])]:
            together = ", ".join(f"{name} {golden[name].shape}" for name in names)
            raise SettingError(f"the golden's shapes do not go together: {together}")
    vocab, width = config.vocab_size, config.embed_dim
    for name, array in golden.items():
        fits = True
        if name in TOKENS:
            fits = array.min() >= 0 and array.max() < vocab
        elif name.endswith("logits"):
            fits = array.shape[-1:] == (vocab,)
        elif name.startswith("hidden_"):
            fits = array.shape[-1:] == (width,) and name in map(
                "hidden_{}".format, range(config.num_layers + 1)
            )
        if not fits:
            raise SettingError(
                f"the golden's {name} {array.shape} is not of this model, with {config.num_layers}"
                f" layers of width {width} and {vocab} tokens"
            )


def compare(model: Model, golden: Golden, tolerance: float) -> Iterator[Part]:
    """Every part that the golden has, beside the model's own."""
    with jax.default_matmul_precision("highest"):
        for part, names in FULL.items():
            if names[-1] in golden:
                ids, mask, positions, expected = (golden[name] for name in names)
                logits = sequence_logits(model, ids, positions, mask)
                yield measure(part, logits[mask == 1], expected[mask == 1], tolerance)
        for part, names in GREEDY.items():
            if names[-1] in golden:
                prompts, *masks, ids, expected = (golden[name] for name in names)
                mask = masks[0] if masks else np.ones_like(prompts)
                ids = ids.reshape(len(prompts), -1)
                expected = expected.reshape(*ids.shape, -1)
                rows = [row[seen == 1] for row, seen in zip(prompts, mask, strict=True)]
                logits = cached_logits(model, rows, ids[:, None])[:, 0]
                yield measure(part, logits, expected, tolerance, ids)
        if any(name.startswith("hidden_") for name in golden):
            states = layer_inputs(model, golden["gen_prompt"])
            names = [f"input of layer {index}" for index in range(len(states) - 1)]
            for index, name in enumerate([*names, "final norm"]):
                if f"hidden_{index}" in golden:
                    yield measure(name, states[index], golden[f"hidden_{index}"], tolerance)


@functools.partial(jax.jit, static_argnums=0)
def _sequences(lm: Qwen3, variables: Any, tokens: Any, positions: Any, mask: Any) -> Any:
    hidden = lm.apply(variables, tokens, positions, mask)
    return lm.apply(variables, hidden, method="logits")


def sequence_logits(
    model: Model, tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Logits [B, T, V] of whole sequences; mask is 1 for tokens."""
    arrays = (jnp.asarray(a, jnp.int32) for a in (tokens, positions))
    return np.asarray(_sequences(*model, *arrays, jnp.asarray(mask == 1)))


@functools.partial(jax.jit, static_argnums=(0, 5))
def _steps(lm: Qwen3, variables: Any, tokens: Any, lengths: Any, forced: Any, unroll: bool) -> Any:
    prompts, completions, steps = forced.shape
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    mask = positions < lengths[:, None]
    prefilled: Any = lm.apply(variables, tokens, positions, mask, method="prefill")
    hidden, keys_values = prefilled
    last = hidden[jnp.arange(prompts), None, lengths - 1]
    cache = widen_cache(init_cache(keys_values, lengths, completions), steps)
    layers = None
    if unroll:
        cache = unstack_cache(cache)
        layers = tuple(layer(variables, index) for index in range(lm.config.num_layers))

    def step(cache, column):
        state, cache = decode(lm, variables, column, cache, layers)
        return cache, state

    _, states = jax.lax.scan(step, cache, jnp.moveaxis(forced, 2, 0)[:-1])
    first = jnp.broadcast_to(last, (1, prompts, completions, last.shape[-1]))
    states = jnp.moveaxis(jnp.concatenate([first, states]), 0, 2)
    return lm.apply(variables, states, method="logits")


def cached_logits(
    model: Model, prompts: Sequence[np.ndarray], forced: np.ndarray, unroll: bool = False
) -> np.ndarray:
    """Logits [prompt, completion, step, V] that choose the `forced` tokens, fed one by one.

    unroll: layer by layer, as the sampler does it on a CPU, and not in a scan.
    """
    tokens, mask = pad(prompts, left=False)
    arrays = (jnp.asarray(a, jnp.int32) for a in (tokens, mask.sum(axis=1), forced))
    return np.asarray(_steps(*model, *arrays, unroll))


def layer_inputs(model: Model, prompt: np.ndarray) -> list[np.ndarray]:
    """What goes into each layer, [1, P, D], and what comes out of the final norm."""
    lm, variables = model
    block: Any = Block(lm.config, lm.dtype, lm.lora)
    mask = np.ones_like(prompt)
    positions, seen = jnp.asarray(positions_of(mask)), jnp.asarray(mask == 1)

    @jax.jit
    def through(variables, index, x):
        return block.apply(layer(variables, index), x, positions, seen, False)[0]

    states = [lm.apply(variables, jnp.asarray(prompt), method="embed")]
    for index in range(lm.config.num_layers):
        states.append(through(variables, jnp.int32(index), states[-1]))
    states[-1] = lm.apply(variables, states[-1], method="final_norm")
    return [np.asarray(state) for state in states]


def measure(
    name: str,
    ours: np.ndarray,
    expected: np.ndarray,
    tolerance: float,
    greedy: np.ndarray | None = None,
) -> Part:
    """One line of the table; `greedy` are the token ids that `expected` chose."""
    if ours.shape != expected.shape:
        raise SettingError(f"{name}: the golden has the shape {expected.shape}, not {ours.shape}")
    delta = float(np.abs(ours - expected).max())
    bound = tolerance * max(1.0, float(expected.std()))
    if greedy is None:
        return Part(name, delta, bound)
    same = ours.argmax(axis=-1) == greedy
    second, first = np.moveaxis(np.partition(expected, -2, axis=-1)[..., -2:], -1, 0)
    doubtful = first - second <= 2 * bound
    return Part(name, delta, bound, f"{same.sum()}/{same.size}", not (same | doubtful).all())


def part_table(parts: Sequence[Part]) -> Table:
    """The parts for a person."""
    table = Table()
    for column in ("part", "max |delta|", "allowed", "tokens alike", "verdict"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in parts:
        verdict = "ok" if part.agrees else "OFF"
        table.add_row(part.name, f"{part.delta:.1e}", f"{part.bound:.1e}", part.tokens, verdict)
    return table


if __name__ == "__main__":
    sys.exit(main())
