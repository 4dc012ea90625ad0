"""What must hold of every function here at once: padding, cuts and order do not matter.

Each case below is a function of `[B, R]` arrays and a mask; a loss also gets a scalar per row.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_jax.rl import losses
from fuse_jax.rl.advantages import gae
from fuse_jax.rl.kl import kl_estimate
from fuse_jax.rl.masked import masked_mean, masked_whiten, response_mask
from fuse_jax.rl.metrics import combine_metrics
from fuse_jax.rl.rewards import shape_rewards

B, R = 4, 6
GARBAGE = [np.nan, np.inf, -np.inf, 1e38, -1e38]
lengths = st.lists(st.integers(0, R), min_size=B, max_size=B)
seeds = st.integers(0, 2**31)
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True)


def policy(a, b, c, weights):
    return losses.policy_loss(a, b, c, weights, clip_eps_low=0.2, clip_eps_high=0.28, dual_clip=3.0)


def value(a, b, c, weights):
    return losses.value_loss(a, b, c, weights, value_clip_eps=0.2)


def plain(f):
    """A loss without metrics, in the form of the others; unused arrays are dropped."""
    return lambda a, b, c, weights: (f(a, b, weights), {})


LOSSES = {
    "policy": policy,
    "value": value,
    "value_unclipped": losses.value_loss,
    "kl_k2": plain(functools.partial(losses.kl_loss, kind="k2")),
    "kl_k3": plain(functools.partial(losses.kl_loss, kind="k3")),
    "entropy": plain(lambda a, b, w: losses.entropy_bonus(a, w)),
    "next_token": plain(lambda a, b, w: losses.next_token_loss(a, w)),
    "bradley_terry": lambda a, b, c, w: losses.bradley_terry_loss(a, b, w, margin=c, score_l2=0.01),
}
LOSS_STEPS = {
    name: jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))
    for name, f in LOSSES.items()
}


@jax.jit
def experience(log_probs, ref_log_probs, values, mask, scores):
    """From scores to whitened advantages, as a trainer chains them."""
    kl = kl_estimate(log_probs, ref_log_probs, "k3")
    rewards = shape_rewards(scores, kl, mask, kl_coef=0.1)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    return rewards, returns, masked_whiten(advantages, mask), masked_mean(kl, mask)


def draw(seed, row_lengths):
    rng = np.random.default_rng(seed)
    arrays = [a.astype(np.float32) for a in rng.normal(size=(3, B, R)) * 0.5]
    mask = np.asarray(response_mask(jnp.array(row_lengths), R))
    return arrays, mask, rng


def soil(arrays, mask, rng):
    """Other garbage in every padded place."""
    noise = rng.choice(GARBAGE, size=(len(arrays), *mask.shape)).astype(np.float32)
    return [np.where(mask != 0, a, n) for a, n in zip(arrays, noise, strict=True)]


def assert_same_bits(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert np.isfinite(a).all()


def assert_close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


@pytest.mark.parametrize("name", LOSSES)
@EXAMPLES
@given(seed=seeds, row_lengths=lengths)
def test_garbage_under_the_mask_changes_no_bit_of_loss_metrics_or_gradient(name, seed, row_lengths):
    arrays, mask, rng = draw(seed, row_lengths)
    weights = losses.loss_weights(mask, "sequence_mean")
    clean = LOSS_STEPS[name](*arrays, weights)
    assert_same_bits(LOSS_STEPS[name](*soil(arrays, mask, rng), weights), clean)
    for grad in clean[1]:
        np.testing.assert_array_equal(np.asarray(grad)[mask == 0], 0)


@EXAMPLES
@given(seed=seeds, row_lengths=lengths)
def test_garbage_under_the_mask_changes_no_bit_of_the_experience(seed, row_lengths):
    arrays, mask, rng = draw(seed, row_lengths)
    scores = rng.normal(size=B).astype(np.float32)
    clean = experience(*arrays, mask, scores)
    dirty_scores = np.where(mask.any(1), scores, np.nan).astype(np.float32)
    assert_same_bits(experience(*soil(arrays, mask, rng), mask, dirty_scores), clean)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("name", ["policy", "value", "kl_k2"])
def test_any_cut_adds_up_to_the_whole(name, mode):
    """8 rows as 1x8, 2x4, 4x2, 8x1 and an uneven cut, rows in any order, one row excluded."""
    rng = np.random.default_rng(5)
    arrays = [a.astype(np.float32) for a in rng.normal(size=(3, 8, R)) * 0.5]
    mask = np.asarray(response_mask(jnp.array([6, 1, 3, 0, 2, 6, 4, 5]), R))
    valid = np.array([1, 1, 0, 1, 1, 1, 1, 1])
    weights = np.asarray(losses.loss_weights(mask, mode, sample_valid=valid))
    step = LOSS_STEPS[name]
    (loss, metrics), grads = step(*arrays, weights)
    assert np.abs(grads[0]).max() > 0
    for cuts in ([2, 4, 6], [4], list(range(1, 8)), [1, 2, 4]):
        order = rng.permutation(8)
        parts = np.split(order, cuts)
        out = [step(*(a[rows] for a in arrays), weights[rows]) for rows in parts]
        np.testing.assert_allclose(sum(o[0][0] for o in out), loss, rtol=1e-6, atol=1e-6)
        assert_close(functools.reduce(combine_metrics, [o[0][1] for o in out]), metrics)
        for i in range(3):
            joined = np.concatenate([o[1][i] for o in out])
            np.testing.assert_allclose(joined, grads[i][order], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["policy", "value", "bradley_terry"])
def test_a_row_packed_end_to_end_with_others_is_the_same_loss(name):
    arrays, mask, _ = draw(2, [6, 2, 0, 3])
    weights = np.asarray(losses.loss_weights(mask, "sequence_mean"))
    padded = LOSS_STEPS[name](*arrays, weights)
    kept = mask != 0
    packed = LOSS_STEPS[name](*(a[kept] for a in arrays), weights[kept])
    assert_close(packed[0], padded[0])
    assert_close(packed[1], tuple(g[kept] for g in padded[1]))


@pytest.mark.parametrize("width", [8, 16])
def test_padded_width_does_not_matter(width):
    arrays, mask, rng = draw(3, [6, 2, 0, 3])
    scores = rng.normal(size=B).astype(np.float32)
    pads = ((0, 0), (0, width - R))
    wide = [np.pad(a, pads, constant_values=np.nan) for a in arrays]
    got = experience(*wide, np.pad(mask, pads), scores)
    expected = experience(*arrays, mask, scores)
    assert_close([a[:, :R] for a in got[:3]], list(expected[:3]))
    weights, wide_weights = (
        losses.loss_weights(m, "sequence_mean") for m in (mask, np.pad(mask, pads))
    )
    step = LOSS_STEPS["policy"]
    assert_close(step(*wide, wide_weights)[0], step(*arrays, weights)[0])


@EXAMPLES
@given(seed=seeds, row_lengths=lengths)
def test_order_of_samples_does_not_matter(seed, row_lengths):
    arrays, mask, rng = draw(seed, row_lengths)
    scores, order = rng.normal(size=B).astype(np.float32), rng.permutation(B)
    straight = experience(*arrays, mask, scores)
    shuffled = experience(*(a[order] for a in arrays), mask[order], scores[order])
    np.testing.assert_array_equal(shuffled[0], straight[0][order])
    np.testing.assert_array_equal(shuffled[1], straight[1][order])
    np.testing.assert_allclose(shuffled[2], straight[2][order], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_to_train_on_gives_zero_and_not_nan(name):
    arrays = [np.full((B, R), np.nan, np.float32)] * 3
    (loss, metrics), grads = LOSS_STEPS[name](*arrays, np.zeros((B, R), np.float32))
    for leaf in jax.tree.leaves((loss, metrics, grads)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_a_batch_of_one_sample_with_one_token():
    arrays = [np.full((1, 1), x, np.float32) for x in (-1.0, -1.5, 0.3)]
    mask, scores = np.ones((1, 1), np.float32), np.array([2.0], np.float32)
    rewards, returns, advantages, kl = experience(*arrays, mask, scores)
    assert advantages[0, 0] == 0
    np.testing.assert_allclose(rewards, [[2 - 0.1 * kl]], rtol=1e-6)
    np.testing.assert_allclose(returns, rewards, rtol=1e-6)


def test_an_excluded_sample_might_as_well_not_be_there():
    """A NaN score: its row leaves the mask, and nothing else moves."""
    arrays, mask, _ = draw(4, [6, 2, 5, 3])
    scores = np.array([1.0, np.nan, 0.5, -1.0], np.float32)
    valid = np.isfinite(scores)
    got = experience(*arrays, mask * valid[:, None], scores)
    rest = experience(*(a[valid] for a in arrays), mask[valid], scores[valid])
    assert_close([a[valid] for a in got[:3]], list(rest[:3]))
    weights = losses.loss_weights(mask, "token_mean", sample_valid=valid)
    rest_weights = losses.loss_weights(mask[valid], "token_mean")
    assert_close(
        LOSS_STEPS["policy"](*arrays[:2], got[2], weights)[0],
        LOSS_STEPS["policy"](*(a[valid] for a in arrays[:2]), rest[2], rest_weights)[0],
    )


def test_combined_metrics_add_except_maxima_and_must_match():
    a, b = {"x": 1.0, "x_max": 5.0}, {"x": 2.0, "x_max": 3.0}
    assert combine_metrics(a, b) == {"x": 3.0, "x_max": 5.0}  # pyright: ignore
    with pytest.raises(ValueError, match=r"differ in \['x_max'\]"):
        combine_metrics(a, {"x": 1.0})  # pyright: ignore
