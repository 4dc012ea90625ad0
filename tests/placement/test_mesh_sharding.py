"""Mesh sizes, sharding rules, and forwards on meshes against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from fuse_jax.config import MeshConfig
from fuse_jax.models import heads, transformer
from fuse_jax.models.architecture import Architecture
from fuse_jax.placement import mesh as meshes
from fuse_jax.placement import sharding

ARCH = Architecture(
    "qwen2",
    vocab_size=48,
    hidden_size=16,
    intermediate_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    attention_bias=True,
)


def shapes(arch, head="lm"):
    return jax.eval_shape(lambda: transformer.init(arch, jax.random.key(0), head=head))


def specs_of(arch, mesh, head="lm"):
    return jax.tree.map(lambda s: s.spec, sharding.parameter_specs(arch, shapes(arch, head), mesh))


def test_minus_one_takes_what_is_left():
    assert meshes.mesh_sizes(MeshConfig(-1, 2, 2), 8) == (2, 2, 2)
    assert meshes.mesh_sizes(MeshConfig(2, -1, 1), 8) == (2, 4, 1)
    mesh = meshes.make_mesh(MeshConfig(-1, 1, 2))
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    assert meshes.row_shards(mesh) == 4


def test_a_divisor_uses_the_first_devices():
    mesh = meshes.make_mesh(MeshConfig(1, 1, 2))
    assert list(mesh.devices.flat) == jax.devices()[:2]
    assert dict(meshes.single_device_mesh().shape) == {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MeshConfig(-1, 3, 1), "mesh.fsdp=3"),
        (MeshConfig(16, 1, 1), "mesh.data=16"),
        (MeshConfig(-1, -1, 1), "mesh.data and mesh.fsdp"),
        (MeshConfig(-1, 0, 1), "mesh.fsdp=0"),
    ],
)
def test_impossible_meshes_name_the_key(config, words):
    with pytest.raises(ValueError, match=words):
        meshes.make_mesh(config)


def test_rules_cut_columns_then_rows_and_never_layers():
    specs = specs_of(ARCH, meshes.make_mesh(MeshConfig(2, 2, 2)))
    blocks = specs["blocks"]
    for name in ("query", "key", "value", "gate", "up"):
        assert blocks[name]["kernel"] == P(None, "fsdp", "tensor")
    for name in ("attention_out", "down"):
        assert blocks[name]["kernel"] == P(None, "tensor", "fsdp")
    assert blocks["query"]["bias"] == P(None, "tensor")
    assert specs["embed"]["embedding"] == P("tensor", "fsdp")
    assert specs["head"]["kernel"] == P("fsdp", "tensor")
    assert all(spec[0] is None for spec in jax.tree.leaves(blocks))


def test_kv_heads_are_replicated_where_they_divide_tensor():
    mesh = meshes.make_mesh(MeshConfig(1, 2, 4))
    specs = specs_of(ARCH, mesh)
    assert specs["blocks"]["key"]["kernel"] == P(None, "fsdp", None)
    assert specs["blocks"]["value"]["bias"] == P(None, None)
    assert specs["blocks"]["query"]["kernel"] == P(None, "fsdp", "tensor")
    assert sharding.kv_heads_axis(ARCH, mesh) is None


def test_odd_vocabularies_fall_back_to_hidden_and_odd_hidden_stays_whole(caplog):
    arch = Architecture(vocab_size=49, hidden_size=16, intermediate_size=32)
    mesh = meshes.make_mesh(MeshConfig(2, 2, 2))
    specs = specs_of(arch, mesh)
    # 49 is odd: tensor moves to the hidden axis, and fsdp does not divide the vocabulary either.
    assert specs["embed"]["embedding"] == P(None, "tensor")
    assert specs["head"]["kernel"] == P("tensor", None)
    with caplog.at_level("WARNING", logger="absl"):
        specs_of(arch, mesh)
    assert "2 of 12 parameters" in caplog.text and "embed/embedding[49, 16]" in caplog.text


def test_scalar_heads_and_optimiser_moments_follow_the_same_rules(caplog):
    mesh = meshes.make_mesh(MeshConfig(2, 2, 2))
    params = shapes(ARCH, "scalar")
    with caplog.at_level("WARNING", logger="absl"):
        assert specs_of(ARCH, mesh, "scalar")["head"]["kernel"] == P("fsdp", None)
    assert not caplog.text
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    specs = sharding.parameter_specs(ARCH, state, mesh)
    assert specs[0].mu["blocks"]["down"]["kernel"].spec == P(None, "tensor", "fsdp")
    assert specs[0].count.spec == P()


def test_unknown_parameters_are_refused():
    mesh = meshes.single_device_mesh()
    tree = {"blocks": {"adapter": {"kernel": np.zeros((2, 4, 4))}}}
    with pytest.raises(KeyError, match="blocks/adapter/kernel"):
        sharding.parameter_specs(ARCH, tree, mesh)


@pytest.mark.parametrize(
    ("changes", "tensor", "words"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, r"mesh.tensor=4.*model.num_heads=6"),
        ({"intermediate_size": 30}, 4, r"mesh.tensor=4.*model.intermediate_size=30"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, r"mesh.tensor=2.*model.num_kv_heads=3"),
    ],
)
def test_what_tensor_cannot_cut_is_refused_by_key(changes, tensor, words):
    arch = Architecture(**{"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 32} | changes)
    with pytest.raises(ValueError, match=words):
        sharding.check_divisible(arch, MeshConfig(-1, 1, tensor))
    with pytest.raises(ValueError, match=words):
        sharding.parameter_specs(arch, shapes(arch), meshes.make_mesh(MeshConfig(-1, 1, tensor)))
    sharding.check_divisible(arch, MeshConfig(1, 8, 1))


def test_batches_are_cut_by_rows():
    mesh = meshes.make_mesh(MeshConfig(2, 2, 2))
    tokens = sharding.shard(jnp.zeros((8, 4), jnp.int32), sharding.batch_sharding(mesh))
    assert {s.data.shape for s in tokens.addressable_shards} == {(2, 4)}
    whole = sharding.shard(jnp.zeros((8, 4)), sharding.replicated(mesh))
    assert {s.data.shape for s in whole.addressable_shards} == {(8, 4)}


def loss_and_statistics(params, tokens):
    hidden = transformer.forward(ARCH, params, tokens)
    stats = heads.token_statistics(params, hidden[:, :-1], tokens[:, 1:])
    return -stats.log_probs.mean(), stats.log_probs


def on_mesh(shape, params, tokens):
    mesh = meshes.make_mesh(MeshConfig(*shape))
    cut = sharding.shard(params, sharding.parameter_specs(ARCH, params, mesh))
    return cut, sharding.shard(tokens, sharding.batch_sharding(mesh))


@pytest.fixture(scope="module")
def on_one_device():
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: (0.2 * rng.standard_normal(s.shape)).astype(np.float32), shapes(ARCH)
    )
    tokens = rng.integers(0, 48, (8, 12)).astype(np.int32)
    value = jax.jit(jax.value_and_grad(loss_and_statistics, has_aux=True))(params, tokens)
    return params, tokens, value


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 2, 4)])
def test_meshes_give_the_log_probs_of_one_device(shape, on_one_device):
    params, tokens, ((loss, log_probs), _) = on_one_device
    cut, rows = on_mesh(shape, params, tokens)
    loss_m, log_probs_m = jax.jit(loss_and_statistics)(cut, rows)
    np.testing.assert_allclose(loss_m, loss, atol=1e-5)
    np.testing.assert_allclose(log_probs_m, log_probs, atol=1e-5)
    kernel = cut["blocks"]["gate"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // (shape[1] * shape[2])


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((8, 1, 1), marks=pytest.mark.slow),
        (2, 2, 2),
        pytest.param((1, 2, 4), marks=pytest.mark.slow),
    ],
)
def test_meshes_give_the_gradients_of_one_device(shape, on_one_device):
    params, tokens, (_, grads) = on_one_device
    step = jax.jit(jax.grad(loss_and_statistics, has_aux=True))
    grads_m, _ = step(*on_mesh(shape, params, tokens))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads_m, grads)
