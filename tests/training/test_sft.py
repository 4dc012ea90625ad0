"""Supervised steps: packing, grouping and meshes change nothing; a toy is learnt by heart."""

from functools import partial

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuse_jax.config import ComputeConfig, MeshConfig, OptimizerConfig
from fuse_jax.data.packing import pack_demonstrations
from fuse_jax.data.records import Demonstration
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.transformer import forward
from fuse_jax.placement.mesh import make_mesh, single_device_mesh
from fuse_jax.training.gradients import accumulate
from fuse_jax.training.minibatch import BucketBatches
from fuse_jax.training.optimizers import make_optimizer
from fuse_jax.training.sft import cut_rows, group_rows, make_sft_step, sft_loss
from fuse_jax.training.state import create_state

ARCH = Architecture("llama", 19, 16, 32, 1, 2, 2, 8)
COMPUTE = ComputeConfig()


def demonstrations(count=9, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        prompt = rng.integers(2, 19, 1 + index % 3).astype(np.int32)
        response = rng.integers(2, 19, 1 + index % 5).astype(np.int32)
        made.append(Demonstration(prompt, response))
    return made


def packed(items=None, rows=8):
    return pack_demonstrations(items or demonstrations(), rows, 16)


@partial(jax.jit, static_argnums=2)
def gradient(params, rows, compute=COMPUTE):
    loss = partial(sft_loss, arch=ARCH, compute=compute)
    return accumulate(loss, params, (BucketBatches(rows, rows.tokens.shape[0]),))


def trained(state, step, batch, count):
    losses = []
    for _ in range(count):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def start(optimizer, mesh):
    params = {"actor": drawn.parameters(ARCH, 0)}
    return create_state(params, {"actor": optimizer}, {"actor": ARCH}, mesh)


def test_the_loss_is_the_mean_over_answer_tokens_of_unpacked_demonstrations():
    items, params = demonstrations(), drawn.parameters(ARCH, 1)
    _, metrics = gradient(params, cut_rows(packed(items), 1024))
    log_softmax = jax.jit(
        lambda x: jax.nn.log_softmax(forward(ARCH, params, x)[0] @ params["head"]["kernel"])
    )
    total = count = 0
    for item in items:
        p, tokens = len(item.prompt_tokens), [*item.prompt_tokens, *item.response_tokens]
        padded = np.zeros((1, 8), np.int32)
        padded[0, : len(tokens)] = tokens
        log_p = np.asarray(log_softmax(padded))
        total -= sum(log_p[t - 1, tokens[t]] for t in range(p, len(tokens)))
        count += len(item.response_tokens)
    assert float(metrics["loss"]) == pytest.approx(total / count, rel=1e-5)


def test_groups_of_rows_add_up_to_one_batch():
    params, batch = drawn.parameters(ARCH, 1), packed()
    whole, parts = cut_rows(batch, 1024), cut_rows(batch, 48)
    assert whole.tokens.shape == (1, 8, 16) and parts.tokens.shape == (3, 3, 16)
    expected, metrics = gradient(params, whole)
    got, part_metrics = gradient(params, parts)
    assert float(part_metrics["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    top = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * top)


def test_prompts_padding_and_segment_boundaries_have_no_weight():
    params, batch = drawn.parameters(ARCH, 1), packed()
    rows = cut_rows(batch, 1024)
    expected = gradient(params, rows)
    ignored = np.asarray(batch.loss_mask)[None] == 0
    starts = rows.positions == 0
    # Weight where nothing is predicted from its own segment must not count.
    spoilt = rows._replace(weights=np.where(starts, 5.0, rows.weights).astype(np.float32))
    padding = rows.segment_ids == 0
    spoilt = spoilt._replace(tokens=np.where(padding, 7, rows.tokens).astype(np.int32))
    assert ignored[starts].all()
    inside = np.asarray(gradient(params, spoilt._replace(weights=rows.weights))[1]["loss"])
    assert inside == np.asarray(expected[1]["loss"])
    again = gradient(params, rows._replace(weights=np.where(padding, 0.0, spoilt.weights)))
    assert float(again[1]["loss"]) == float(expected[1]["loss"])


def test_rows_are_grouped_evenly_and_filled_up_for_the_shards():
    rows = np.arange(24 * 4).reshape(24, 4)
    assert group_rows(rows, 1000, 1).shape == (1, 24, 4)
    assert group_rows(rows, 40, 1).shape == (3, 8, 4)
    assert group_rows(rows, 40, 8).shape == (3, 8, 4)
    grouped = group_rows(rows[:21], 40, 4)
    assert grouped.shape == (3, 8, 4)
    np.testing.assert_array_equal(grouped.reshape(24, 4)[:21], rows[:21])
    assert (grouped.reshape(24, 4)[21:] == 0).all()
    assert group_rows(rows, 1, 1).shape == (24, 1, 4)


def test_a_toy_is_learnt_by_heart_on_every_mesh():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.02, b2=0.95), 60)
    batch, losses = packed(demonstrations(6)), {}
    for sizes in ((1, 1, 1), (2, 2, 2)):
        mesh = single_device_mesh() if sizes == (1, 1, 1) else make_mesh(MeshConfig(*sizes))
        step = make_sft_step(mesh, ARCH, COMPUTE, optimizer)
        count = 60 if sizes == (1, 1, 1) else 2
        state, losses[sizes] = trained(start(optimizer, mesh), step, batch, count)
        assert int(state.updates["actor"]) == count
    assert losses[1, 1, 1][0] > 2.0 and losses[1, 1, 1][-1] < 0.1
    assert losses[2, 2, 2] == pytest.approx(losses[1, 1, 1][:2], rel=1e-5)
