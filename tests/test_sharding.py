import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from agon_jax.config import LoraConfig, MeshConfig
from agon_jax.models.lora import init_lora
from agon_jax.models.qwen3 import Qwen3, Qwen3Config, init_base
from agon_jax.sharding import batch_sharding, make_mesh, tree_shardings


def shapes(tie: bool = False):
    config = Qwen3Config(32, 8, 16, 2, 4, 2, 4, 1e4, 1e-6, tie)
    return jax.eval_shape(lambda: init_base(Qwen3(config), jax.random.key(0)))


def specs(tree, leading=(), **axes):
    mesh = make_mesh(MeshConfig(**axes), jax.devices()[: math.prod(axes.values())])
    return jax.tree.map(lambda sharding: sharding.spec, tree_shardings(tree, mesh, leading))


def test_every_parameter_is_split_over_fsdp_and_tensor():
    spec = specs(shapes(), data=2, fsdp=2, tensor=2)
    assert spec["embed_tokens"] == spec["lm_head"] == PartitionSpec("tensor", "fsdp")
    layers = {name: s["kernel"] for name, s in spec["layers"].items() if "kernel" in s}
    assert layers == {
        "q_proj": PartitionSpec(None, "fsdp", "tensor", None),
        "k_proj": PartitionSpec(None, "fsdp", "tensor", None),
        "v_proj": PartitionSpec(None, "fsdp", "tensor", None),
        "o_proj": PartitionSpec(None, "tensor", None, "fsdp"),
        "gate_proj": PartitionSpec(None, "fsdp", "tensor"),
        "up_proj": PartitionSpec(None, "fsdp", "tensor"),
        "down_proj": PartitionSpec(None, "tensor", "fsdp"),
    }
    assert spec["norm"]["scale"] == spec["layers"]["q_norm"]["scale"] == PartitionSpec()


def test_an_axis_that_does_not_divide_stays_whole():
    spec = specs(shapes(), data=1, fsdp=2, tensor=4)  # 2 kv heads over 4
    assert spec["layers"]["k_proj"]["kernel"] == PartitionSpec(None, "fsdp", None, None)
    assert spec["layers"]["q_proj"]["kernel"] == PartitionSpec(None, "fsdp", "tensor", None)


def test_adapters_and_counters_are_whole_and_a_stack_of_models_is_split():
    base = shapes()
    adapter = jax.eval_shape(lambda b: init_lora(b, LoraConfig(rank=2), jax.random.key(0)), base)
    axes = {"data": 1, "fsdp": 2, "tensor": 2}
    whole = specs(adapter, ("policy",), **axes)
    assert set(jax.tree.leaves(whole)) == {PartitionSpec()}
    stack = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), base)
    count = jax.ShapeDtypeStruct((2,), jnp.int32)
    spec = specs((stack, count), ("policy",), **axes)
    assert spec[0]["embed_tokens"] == PartitionSpec(None, "tensor", "fsdp")
    assert spec[1] == PartitionSpec()


def test_an_unknown_parameter_is_named():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(KeyError, match="layers/router/kernel"):
        tree_shardings({"layers": {"router": {"kernel": jnp.zeros((2, 3))}}}, mesh)


def test_mesh_is_auto_and_its_product_must_be_the_devices():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert batch_sharding(mesh).spec == PartitionSpec(None, ("data", "fsdp"))
    for config in (MeshConfig(data=2), MeshConfig(fsdp=2), MeshConfig(tensor=3)):
        with pytest.raises(ValueError, match=r"mesh\.fsdp.*number of devices, 1"):
            make_mesh(config, jax.devices()[:1])
