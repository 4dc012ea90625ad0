"""From scores to per-token rewards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_numpy as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_jax.rl.masked import response_mask
from fuse_jax.rl.rewards import clip_scores, missing_eos_penalty, shape_rewards

NAN = np.nan
shaped = jax.jit(shape_rewards)


def f32(x):
    return jnp.asarray(x, jnp.float32)


def test_by_hand_full_short_one_token_and_empty():
    mask = response_mask(jnp.array([3, 2, 1, 0]), 3)
    kl = jnp.where(mask != 0, 0.5, NAN)
    got = shaped(f32([1, 2, 3, 4]), kl, mask, kl_coef=0.2)
    np.testing.assert_allclose(
        got, [[-0.1, -0.1, 0.9], [-0.1, 1.9, 0], [2.9, 0, 0], [0, 0, 0]], rtol=1e-6
    )


def test_fractions_of_a_score_survive():
    got = shaped(f32([0.73]), jnp.zeros((1, 2)), jnp.ones((1, 2)), kl_coef=0.0)
    np.testing.assert_array_equal(got, f32([[0, 0.73]]))
    with pytest.raises(TypeError, match="scores must be a float32"):
        shape_rewards(jnp.array([1]), jnp.zeros((1, 2)), jnp.ones((1, 2)), kl_coef=0.0)


def test_a_row_that_is_masked_out_drops_its_nan_score():
    mask = f32([[1, 1], [0, 0]])
    got = shaped(f32([1, NAN]), jnp.zeros((2, 2)), mask, kl_coef=0.1)
    np.testing.assert_array_equal(got, [[0, 1], [0, 0]])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.floats(0, 2))
def test_agrees_with_the_oracle(seed, kl_coef):
    rng = np.random.default_rng(seed)
    scores, kl = rng.normal(size=4).astype(np.float32), rng.normal(size=(4, 6)).astype(np.float32)
    mask = rng.integers(0, 2, (4, 6)).astype(np.float32)
    got = shaped(scores, np.where(mask != 0, kl, NAN).astype(np.float32), mask, kl_coef=kl_coef)
    expected = oracle.shape_rewards(scores, kl, mask, kl_coef)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_clip_scores():
    got = clip_scores(f32([-7, 0.3, 5.5, np.inf, NAN]), 5.0)
    np.testing.assert_array_equal(got, f32([-5, 0.3, 5, 5, NAN]))
    with pytest.raises(ValueError, match="limit must be positive"):
        clip_scores(f32([1]), 0.0)


def test_missing_eos_penalty_replaces_the_score():
    truncated = jnp.array([True, False, True, False])
    got = missing_eos_penalty(f32([0.8, 0.8, NAN, NAN]), truncated, -3.0)
    np.testing.assert_array_equal(got, f32([-3, 0.8, -3, NAN]))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(missing_eos_penalty(f32([0.8]), jnp.array([True]), 0.0), [0])


def test_shapes_do_not_broadcast():
    ones = jnp.ones((2, 2), jnp.float32)
    with pytest.raises(ValueError, match=r"scores must have shape \(2,\)"):
        shape_rewards(ones, ones, ones, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"kl \(2, 2\), response_mask \(2, 3\)"):
        shape_rewards(ones[0], ones, jnp.ones((2, 3)), kl_coef=0.1)
    with pytest.raises(ValueError, match=r"truncated \(1,\)"):
        missing_eos_penalty(ones[0], jnp.array([True]), 0.0)
