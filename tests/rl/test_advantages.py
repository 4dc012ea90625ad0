"""Generalised advantage estimation against numbers done by hand and against explicit sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_numpy as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_jax.rl.advantages import gae
from fuse_jax.rl.masked import masked_whiten, response_mask
from fuse_jax.rl.rewards import shape_rewards

NAN = np.nan
jitted = jax.jit(gae, static_argnames=("gamma", "gae_lambda"))
hand = functools.partial(jitted, gamma=1.0, gae_lambda=0.95)


def f32(x):
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("padding", [(0.7, 0.9), (NAN, np.inf)])
def test_by_hand_with_values_in_the_padding(padding):
    rewards, mask = f32([[0, 0, 1, 0, 0]]), f32([[1, 1, 1, 0, 0]])
    values = f32([[0.1, 0.2, 0.3, *padding]])
    advantages, returns = hand(rewards, values, mask)
    np.testing.assert_allclose(advantages, [[0.82675, 0.765, 0.7, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[0.92675, 0.965, 1.0, 0, 0]], rtol=1e-6)


def test_score_lands_on_the_stop_token():
    """Three real tokens, the third the stop token, values 0."""
    mask, zeros = f32([[1, 1, 1, 0, 0]]), jnp.zeros((1, 5), jnp.float32)
    rewards = shape_rewards(f32([1.0]), zeros, mask, kl_coef=0.0)
    np.testing.assert_allclose(hand(rewards, zeros, mask)[0], [[0.9025, 0.95, 1, 0, 0]], rtol=1e-6)


def test_returns_are_not_rewards():
    zeros = jnp.zeros((1, 3), jnp.float32)
    advantages, returns = gae(f32([[0, 0, 1]]), zeros, jnp.ones((1, 3)), gamma=1.0, gae_lambda=1.0)
    np.testing.assert_array_equal(advantages, [[1, 1, 1]])
    np.testing.assert_array_equal(returns, [[1, 1, 1]])


def test_bootstrap_is_the_value_after_the_last_token():
    """delta_1 = 0 + .5 * 4 - 1 = 1; A_0 = (0 + .5 * 1 - 2) + .5 * .5 * 1 = -1.25."""
    rewards, mask = f32([[0, 0, NAN], [0, 0, NAN]]), f32([[1, 1, 0], [1, 1, 0]])
    values = f32([[2, 1, NAN], [2, 1, NAN]])
    advantages, _ = gae(
        rewards, values, mask, gamma=0.5, gae_lambda=0.5, bootstrap_values=f32([4, 0])
    )
    np.testing.assert_allclose(advantages, [[-1.25, 1, 0], [-1.75, -1, 0]], rtol=1e-6)


def test_empty_and_one_token_responses():
    """An empty response ignores even a broken bootstrap value."""
    mask = response_mask(jnp.array([0, 1]), 3)
    rewards, values = f32([[2, NAN, NAN]] * 2), f32([[0.5, NAN, NAN]] * 2)
    advantages, returns = hand(rewards, values, mask, bootstrap_values=f32([NAN, 0]))
    np.testing.assert_array_equal(advantages, [[0, 0, 0], [1.5, 0, 0]])
    np.testing.assert_array_equal(returns, [[0, 0, 0], [2, 0, 0]])


def test_a_hole_in_the_mask_is_stepped_over():
    advantages, _ = hand(f32([[0, 9, 1]]), f32([[0.1, 9, 0.3]]), f32([[1, 0, 1]]))
    np.testing.assert_allclose(advantages, [[0.2 + 0.95 * 0.7, 0, 0.7]], rtol=1e-6)


def test_a_constant_added_to_all_scores_is_gone_after_whitening():
    """With values off by the same constant, as a critic would learn them."""
    rng = np.random.default_rng(0)
    mask = response_mask(jnp.array([6, 2, 4]), 6)
    scores, values = f32(rng.normal(size=3)), f32(rng.normal(size=(3, 6)))
    kl = f32(rng.normal(size=(3, 6)))

    @jax.jit
    def whitened(shift):
        rewards = shape_rewards(scores + shift, kl, mask, kl_coef=0.1)
        advantages, _ = hand(rewards, values + shift, mask)
        return masked_whiten(advantages, mask)

    np.testing.assert_allclose(whitened(10.0), whitened(0.0), atol=2e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**31),
    st.sampled_from([(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)]),
    st.booleans(),
)
def test_agrees_with_explicit_sums(seed, discounts, bootstrapped):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 4, 6)).astype(np.float32)
    mask = rng.integers(0, 2, (4, 6)).astype(np.float32)  # holes and empty rows included
    bootstrap = rng.normal(size=4).astype(np.float32) * bootstrapped
    dirty = [np.where(mask != 0, a, NAN).astype(np.float32) for a in (rewards, values)]
    gamma, gae_lambda = discounts
    got = jitted(*dirty, mask, gamma=gamma, gae_lambda=gae_lambda, bootstrap_values=bootstrap)
    expected = oracle.gae(rewards, values, mask, gamma, gae_lambda, bootstrap)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-5)


def test_padding_width_does_not_matter():
    rng = np.random.default_rng(1)
    rewards, values = f32(rng.normal(size=(2, 3, 5)))
    mask = response_mask(jnp.array([5, 1, 3]), 5)
    wide = [jnp.pad(a, ((0, 0), (0, 4)), constant_values=7.0) for a in (rewards, values)]
    got, _ = hand(*wide, jnp.pad(mask, ((0, 0), (0, 4))))
    np.testing.assert_array_equal(got[:, :5], hand(rewards, values, mask)[0])
    np.testing.assert_array_equal(got[:, 5:], 0)


def test_errors_name_the_argument():
    ones = jnp.ones((2, 3), jnp.float32)
    with pytest.raises(TypeError, match="rewards must be a float32"):
        gae(jnp.ones((2, 3), jnp.int32), ones, ones, gamma=1, gae_lambda=1)
    with pytest.raises(ValueError, match=r"values \(2, 4\)"):
        gae(ones, jnp.ones((2, 4)), ones, gamma=1, gae_lambda=1)
    with pytest.raises(ValueError, match=r"bootstrap_values must have shape \(2,\)"):
        gae(ones, ones, ones, gamma=1, gae_lambda=1, bootstrap_values=ones)
