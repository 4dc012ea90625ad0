"""Weights whose sum with the per-token loss is the wanted mean, however the batch is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_numpy as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_jax.rl.losses import loss_totals, loss_weights, weighted_sum

MODES = ["token_mean", "sequence_mean"]
weights_of = jax.jit(loss_weights, static_argnames="mode")
totals_of = jax.jit(loss_totals)


def f32(x):
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("mode, expected", [("token_mean", 1.75), ("sequence_mean", 1.5)])
def test_by_hand_on_unequal_lengths(mode, expected):
    losses, mask = f32([[1, 9, 9], [2, 2, 2]]), f32([[1, 0, 0], [1, 1, 1]])
    # 1/6 is no float32: the last bit of the sum depends on the order in which XLA adds.
    got = float(weighted_sum(losses, loss_weights(mask, mode)))
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode, expected", [("token_mean", 1.75), ("sequence_mean", 1.5)])
def test_two_ranks_by_hand(mode, expected):
    """One rank holds a sequence of one token, the other one of three."""
    total = 0.0
    for losses, mask in ([[1, 9, 9]], [[1, 0, 0]]), ([[2, 2, 2]], [[1, 1, 1]]):
        weights = loss_weights(f32(mask), mode, total_tokens=4, total_sequences=2)
        total += weighted_sum(f32(losses), weights)
    assert total == expected


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_count_weighs_nothing(mode):
    np.testing.assert_array_equal(loss_weights(jnp.zeros((2, 3)), mode), np.zeros((2, 3)))
    got = loss_weights(jnp.ones((2, 3)), mode, sample_valid=jnp.zeros(2))
    np.testing.assert_array_equal(got, np.zeros((2, 3)))


@pytest.mark.parametrize("mode", MODES)
def test_excluded_sample_is_in_no_denominator(mode):
    mask = f32([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    got = loss_weights(mask, mode, sample_valid=jnp.array([True, False, True]))
    np.testing.assert_array_equal(got[1], 0)
    kept = loss_weights(mask[jnp.array([0, 2])], mode)
    np.testing.assert_array_equal(got[jnp.array([0, 2])], kept)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from(MODES))
def test_agrees_with_the_oracle_and_sums_to_one(seed, mode):
    rng = np.random.default_rng(seed)
    mask, valid = rng.integers(0, 2, (4, 6)).astype(np.float32), rng.integers(0, 2, 4)
    got = weights_of(mask, mode, sample_valid=valid)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle.loss_weights(mask, mode, valid), rtol=1e-6)
    counted = (mask * valid[:, None]).any()
    np.testing.assert_allclose(got.sum(), float(counted), rtol=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from(MODES), st.integers(1, 2))
def test_parts_with_totals_get_the_weights_of_the_whole(seed, mode, cut):
    rng = np.random.default_rng(seed)
    mask, valid = rng.integers(0, 2, (4, 6)).astype(np.float32), rng.integers(0, 2, 4)
    pieces = [(mask[:cut], valid[:cut]), (mask[cut:], valid[cut:])]
    totals = np.sum([totals_of(m, v) for m, v in pieces], axis=0)
    np.testing.assert_array_equal(totals, totals_of(mask, valid))
    parts = [
        weights_of(m, mode, sample_valid=v, total_tokens=totals[0], total_sequences=totals[1])
        for m, v in pieces
    ]
    np.testing.assert_array_equal(np.concatenate(parts), weights_of(mask, mode, sample_valid=valid))


@pytest.mark.parametrize("mode", MODES)
def test_padded_width_is_in_no_denominator(mode):
    mask = f32([[1, 1, 0, 0], [1, 1, 1, 1]])
    wide = loss_weights(jnp.pad(mask, ((0, 0), (0, 8))), mode)
    np.testing.assert_array_equal(wide[:, :4], loss_weights(mask, mode))


def test_errors_name_the_argument():
    mask = jnp.ones((2, 3))
    with pytest.raises(ValueError, match="token_mean, sequence_mean, got 'mean'"):
        loss_weights(mask, "mean")  # pyright: ignore
    with pytest.raises(ValueError, match="divides by total_sequences"):
        loss_weights(mask, "sequence_mean", total_tokens=3)
    with pytest.raises(ValueError, match="divides by total_tokens"):
        loss_weights(mask, "token_mean", total_sequences=3)
    with pytest.raises(ValueError, match=r"sample_valid must have shape \(2,\)"):
        loss_weights(mask, "token_mean", sample_valid=jnp.ones((2, 1)))
