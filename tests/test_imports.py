"""Who may import whom: the table of the layers, held against the imports of every module."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "agon_jax"

LAYERS = (
    {
        "config", "outcomes", "metrics", "progress", "rewards", "prompts", "withhold",
        "complement", "data", "verifiers",
    },  # plain: no jax, so that verifier processes and their tests start at once
    {"models", "grpo", "sharding", "token_choice"},  # pure JAX
    {"policies", "tokenizer", "sampler", "update", "batching", "checkpoint"},  # devices
    {"rollout", "evaluate"},  # stages
    {"trainer"},  # the line
)  # fmt: skip
LAYER_OF = {module: layer for layer, modules in enumerate(LAYERS) for module in modules}

# Third-party packages that only some may import: by layer, or by module.
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
FLAX = {"flax"}  # flax.linen, in models alone
EDGE = {"gin", "absl", "experiments", "colab"}  # of layer 5
NEVER = {"torch", "peft", "tests"}

# What a module never sees, within the layers it may import.
NEVER_SEES = {
    "rewards": {"prompts"},
    "grpo": {"prompts", "rewards"},
    "verifiers": {"prompts"},
    "models": {"outcomes", "rewards", "prompts", "data", "verifiers"},
    "sampler": {"prompts", "rewards", "outcomes", "data", "verifiers"},
    "update": {"prompts", "rewards", "outcomes", "data", "verifiers"},
}


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of every import in a module of `package`, also inside functions.

    `from x import y` gives x.y, since y may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(module: str, source: str, package: str = "agon_jax") -> list[str]:
    """What the imports of a module (named without "agon_jax.", as in LAYERS) break of the table."""
    own = module.partition(".")[0]
    layer = LAYER_OF[own]
    found = []
    for line, name in imported(source, package):
        root, _, rest = name.partition(".")
        reason = None
        if root in NEVER or root in EDGE:
            reason = "is for experiments and tests"
        elif root in FLAX and (own != "models" or not rest.startswith("linen")):
            reason = "only flax.linen, and only in models"
        elif root in JAX and layer == 0:
            reason = "layer 0 knows no jax"
        elif root == "agon_jax":
            reason = _refused_inside(own, layer, rest.partition(".")[0])
        if reason:
            found.append(f"{module}, line {line}: {name}: {reason}")
    return found


def _refused_inside(own: str, layer: int, other: str) -> str | None:
    if other == own:
        return None
    if other not in LAYER_OF:
        return "no module of the table"
    if LAYER_OF[other] > layer:
        return f"layer {LAYER_OF[other]}, above layer {layer}"
    return f"{own} never sees {other}" if other in NEVER_SEES.get(own, ()) else None


def modules() -> dict[str, tuple[str, str]]:
    """Name without "agon_jax." -> (source, package) of every module but the root's own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        package = parts[:-1]
        if parts[-1] == "__init__":
            parts = package
        if len(parts) > 1:
            found[".".join(parts[1:])] = (path.read_text(encoding="utf-8"), ".".join(package))
    return found


def test_every_module_is_in_the_table():
    assert {name.partition(".")[0] for name in modules()} == set(LAYER_OF)


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_what_its_layer_may(module):
    source, package = modules()[module]
    assert violations(module, source, package) == []


def test_no_module_imports_in_a_circle():
    graph: dict[str, set[str]] = {module: set() for module in LAYER_OF}
    for module, (source, package) in modules().items():
        own = module.partition(".")[0]
        names = [name.split(".") for _, name in imported(source, package)]
        graph[own] |= {name[1] for name in names if name[0] == "agon_jax" and len(name) > 1} - {own}
    while graph:
        leaves = {module for module, others in graph.items() if not others & set(graph)}
        assert leaves, f"these import each other in a circle: {sorted(graph)}"
        graph = {module: others for module, others in graph.items() if module not in leaves}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rewards", "import jax"),
        ("rewards", "import jax.numpy as jnp"),
        ("rewards", "def f():\n    from jax import numpy"),
        ("data.batches", "from optax import adamw"),
        ("metrics", "import orbax.checkpoint as ocp"),
        ("config", "import gin"),
        ("trainer", "from absl import logging"),
        ("update", "from flax import linen as nn"),
        ("models.qwen3", "from flax import nnx"),
        ("models.qwen3", "import flax"),
        ("models.convert", "import torch"),
        ("config", "from agon_jax.models.qwen3 import Qwen3"),
        ("config", "from agon_jax import models"),
        ("models.qwen3", "import agon_jax.sampler"),
        ("sampler", "from agon_jax.rollout import draft"),
        ("rollout", "if True:\n    from agon_jax import trainer"),
        ("config", "from . import sampler"),
        ("config", "from .rollout import draft"),
        ("sampler", "from agon_jax import prompts"),
        ("update", "from agon_jax.rewards import group_advantages"),
        ("rewards", "from agon_jax.prompts import Sections"),
        ("models.lora", "from agon_jax.policies import Pair"),
        ("config", "from agon_jax.secrets import x"),
        ("evaluate", "from experiments.settings import load_run"),
    ],
)
def test_the_check_finds_a_violation(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source", "package"),
    [
        ("models.qwen3", "from flax import linen as nn\nimport jax", "agon_jax.models"),
        ("models.qwen3", "import flax.linen as nn", "agon_jax.models"),
        ("models.qwen3", "from .layers import Attention\nfrom ..config import LoraConfig",
         "agon_jax.models"),
        ("update", "from agon_jax import grpo, sharding\nimport optax", "agon_jax"),
        ("sampler", "from agon_jax.policies import Policy", "agon_jax"),
        ("evaluate", "from agon_jax.rollout import draft", "agon_jax"),
    ],
)  # fmt: skip
def test_the_check_lets_the_table_pass(module, source, package):
    assert violations(module, source, package) == []


def test_a_relative_import_out_of_a_subpackage_is_resolved():
    assert violations("data.jsonl", "from ..sampler import sample", "agon_jax.data") == [
        "data.jsonl, line 1: agon_jax.sampler.sample: layer 2, above layer 0"
    ]


def test_layer_0_loads_no_jax_by_way_of_others_either():
    names = [name for name in modules() if name.partition(".")[0] in LAYERS[0]]
    code = "\n".join(f"import agon_jax.{name}" for name in names)
    code += "\nimport sys\nassert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_pyright_leaves_out_layers_1_and_2_alone():
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    left_out = {Path(path).stem for path in settings["tool"]["pyright"]["exclude"]}
    assert left_out == LAYERS[1] | LAYERS[2]


def test_every_package_that_is_imported_is_declared():
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    declared = {
        re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-")
        for requirement in settings["project"]["dependencies"]
    }
    distributions = packages_distributions()
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.parent.glob("experiments/*.py")]:
        for line, name in imported(path.read_text(encoding="utf-8"), path.parent.name):
            root = name.partition(".")[0]
            if root in {*sys.stdlib_module_names, PACKAGE.name, "experiments", "torch"}:
                continue
            owners = {owner.lower().replace("_", "-") for owner in distributions[root]}
            assert owners & declared, f"{path.name}, line {line}: {root} is not in pyproject.toml"
