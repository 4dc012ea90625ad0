"""Reward-model steps: two passes equal one, a toy preference is learnt, judges count ties."""

from functools import partial

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuse_jax.config import ComputeConfig, MeshConfig, OptimizerConfig
from fuse_jax.data.packing import pack_preferences
from fuse_jax.data.records import Preference
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.heads import scalars
from fuse_jax.models.transformer import forward
from fuse_jax.placement.mesh import make_mesh, single_device_mesh
from fuse_jax.training.held_out_pairs import score_pairs
from fuse_jax.training.optimizers import make_optimizer
from fuse_jax.training.reward_model import (
    auc,
    cut_pairs,
    make_reward_step,
    pair_accuracy,
    reward_gradient,
)
from fuse_jax.training.state import create_state

ARCH = Architecture("llama", 19, 16, 32, 1, 2, 2, 8)
COMPUTE = ComputeConfig()
pack = partial(pack_preferences, rows=8, row_length=16, max_pairs=12)


def preferences(count=9, seed=0, margin=0.0):
    """The better answer holds token 5, the worse one token 6."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        prompt = rng.integers(7, 19, 1 + index % 3).astype(np.int32)
        chosen, rejected = (rng.integers(7, 19, 1 + n % 4).astype(np.int32) for n in (index, 7))
        chosen[-1], rejected[rng.integers(len(rejected))] = 5, 6
        made.append(Preference(prompt, chosen, rejected, margin=margin))
    return made


def params_with_head(seed=1):
    params = drawn.parameters(ARCH, seed, "scalar")
    kernel = 0.3 * jax.random.normal(jax.random.key(seed + 1), (ARCH.hidden_size, 1))
    return {**params, "head": {"kernel": kernel, "bias": jnp.full(1, 0.2)}}


gradient = jax.jit(partial(reward_gradient, arch=ARCH, compute=COMPUTE, score_l2=0.01))


def test_the_loss_of_unpacked_pairs_with_margin_and_square_term():
    items, params = preferences(margin=0.5), params_with_head()
    _, metrics = gradient(params, *cut_pairs(pack(items), 1024))

    token_scores = jax.jit(lambda padded: scalars(params, forward(ARCH, params, padded)))

    def score(tokens):
        padded = np.zeros((1, 8), np.int32)
        padded[0, : len(tokens)] = tokens
        return float(token_scores(padded)[0, len(tokens) - 1])

    losses, wins = [], []
    for item in items:
        c = score([*item.prompt_tokens, *item.chosen_tokens])
        r = score([*item.prompt_tokens, *item.rejected_tokens])
        losses.append(np.log1p(np.exp(r - c + 0.5)) + 0.01 * (c * c + r * r) / 2)
        wins.append(c > r)
    assert float(metrics["loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(wins), abs=1e-6)


def test_two_passes_over_groups_give_the_gradient_of_one_batch():
    params, batch = params_with_head(), pack(preferences())
    assert batch.num_items == 9
    assert (batch.chosen_end[:9, 0] // 3 != batch.rejected_end[:9, 0] // 3).any()
    whole, parts = cut_pairs(batch, 1024), cut_pairs(batch, 48)
    assert whole[0].tokens.shape == (1, 8, 16) and parts[0].tokens.shape == (3, 3, 16)
    expected, metrics = gradient(params, *whole)
    got, part_metrics = gradient(params, *parts)
    for name, value in metrics.items():
        assert float(part_metrics[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    top = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * top)


def test_padding_pairs_and_padding_tokens_change_no_bit():
    params, (rows, pairs) = params_with_head(), cut_pairs(pack(preferences()), 1024)
    expected = gradient(params, rows, pairs)
    real = pairs.weights > 0
    assert real.sum() == 9
    dirty_pairs = pairs._replace(
        chosen_end=np.where(real, pairs.chosen_end, 40).astype(np.int32),
        margin=np.where(real, pairs.margin, np.nan).astype(np.float32),
    )
    empty = rows.segment_ids == 0
    dirty = rows._replace(tokens=np.where(empty, 3, rows.tokens).astype(np.int32))
    got = gradient(params, dirty, dirty_pairs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_toy_preference_is_learnt_on_every_mesh():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.02, b2=0.95), 40)
    metrics = {}
    for sizes in ((1, 1, 1), (2, 2, 2)):
        single = sizes == (1, 1, 1)
        mesh = single_device_mesh() if single else make_mesh(MeshConfig(*sizes))
        step = make_reward_step(mesh, ARCH, COMPUTE, optimizer, score_l2=0.01)
        params = {"reward_model": drawn.parameters(ARCH, 0, "scalar")}
        state = create_state(params, {"reward_model": optimizer}, {"reward_model": ARCH}, mesh)
        history = []
        for number in range(40 if single else 2):
            state, values = step(state, pack(preferences(12, seed=number)))
            history.append(float(values["loss"]))
        metrics[sizes] = history
        if single:
            trained = state.params["reward_model"]
    assert metrics[1, 1, 1][0] == pytest.approx(np.log(2), rel=1e-5)  # the head starts at 0
    assert metrics[1, 1, 1][-1] < 0.3
    assert metrics[2, 2, 2] == pytest.approx(metrics[1, 1, 1][:2], rel=1e-4)
    held_out = preferences(31, seed=1000)
    scores = score_pairs(single_device_mesh(), ARCH, trained, held_out, tokens=256)
    assert pair_accuracy(scores[:, 0], scores[:, 1]) > 0.9
    swapped = [Preference(p.prompt_tokens, p.rejected_tokens, p.chosen_tokens) for p in held_out]
    other = score_pairs(single_device_mesh(), ARCH, trained, swapped, tokens=256)
    assert np.array_equal(other, scores[:, ::-1])


def test_pair_accuracy_counts_ties_one_half():
    assert pair_accuracy(np.array([2.0, 1.0, 0.0, 3.0]), np.array([1.0, 1.0, 1.0, 0.0])) == 0.625
    assert pair_accuracy(np.array([np.nan, 1.0]), np.array([0.0, 0.0])) == 0.5
    assert np.isnan(pair_accuracy(np.array([]), np.array([])))


def test_auc_is_the_share_of_right_wrong_pairs_in_order():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 5, 40).astype(float), rng.random(40) < 0.4
    pairs = [(r > w) + 0.5 * (r == w) for r in scores[labels] for w in scores[~labels]]
    assert auc(scores, labels) == pytest.approx(np.mean(pairs))
    assert np.isnan(auc(scores, np.ones(40, bool)))
    with pytest.raises(ValueError, match="1 scores are NaN"):
        auc(np.array([1.0, np.nan]), np.array([True, False]))
