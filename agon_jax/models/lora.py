"""Low-rank adapters as trees beside the base: made, joined to it, and merged into it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from agon_jax.config import LoraConfig

INPUT_AXES = {"o_proj": 2}  # axes of a kernel that are contracted with the activations; else 1
# A base or an adapter, on the host or on devices.
Tree = PyTree[Float[Array | np.ndarray, "..."]]


def init_lora(base: Tree, lora: LoraConfig, key: Array, noise_std: float = 0.0) -> Tree:
    """A float32 adapter for every targeted matrix of `base`: A ~ U(+-1/sqrt(inputs)), B ~ noise.

    noise_std = 0 makes B zero, so the adapter changes nothing until it is trained (policy A);
    policy B starts with small Gaussian noise there.
    """
    matrices = base["layers"]
    adapter = {}
    for name in lora.targets:
        key, key_a, key_b = jax.random.split(key, 3)
        shape = matrices[name]["kernel"].shape
        split = 1 + INPUT_AXES.get(name, 1)
        inputs, outputs = shape[1:split], shape[split:]
        fan_in = 1
        for size in inputs:
            fan_in *= size
        bound = fan_in**-0.5
        a = jax.random.uniform(key_a, (shape[0], *inputs, lora.rank), minval=-bound, maxval=bound)
        b = noise_std * jax.random.normal(key_b, (shape[0], lora.rank, *outputs))
        adapter[name] = {"a": a, "b": b}
    return {"layers": adapter}


def policy_variables(base: Tree, trainable: Tree, train: str) -> dict[str, Tree]:
    """What `lm.apply` takes for a policy: base and adapter ("lora"), or its own tree ("full")."""
    if train == "full":
        return {"params": trainable}
    return {"params": base, "lora": trainable}


def merge(base: Tree, adapter: Tree, lora: LoraConfig) -> Tree:
    """A new base with W + (alpha / rank) A B in place of W; `base` is left as it was.

    The sum is taken in float32 and rounded to the base's dtype.
    """
    layers = dict(base["layers"])
    for name, factors in adapter["layers"].items():
        kernel, a, b = layers[name]["kernel"], factors["a"], factors["b"]
        a = a.reshape(a.shape[0], -1, a.shape[-1])  # every input axis in one
        b = b.reshape(*b.shape[:2], -1)
        delta = jnp.einsum("LIR,LRO->LIO", a, b, precision="highest").reshape(kernel.shape)
        merged = kernel.astype(jnp.float32) + lora.scale * delta
        layers[name] = {"kernel": merged.astype(kernel.dtype)}
    return {**base, "layers": layers}
