"""Running moments of scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_jax.rl.moments import Moments, init_moments, normalise_scores, update_moments

NAN = np.nan
update = jax.jit(update_moments)


def f32(x):
    return jnp.asarray(x, jnp.float32)


def test_by_hand():
    moments = update(init_moments(), f32([1, 3]), jnp.array([True, True]))
    np.testing.assert_allclose(moments, [2, 2, 2])
    moments = update(moments, f32([8, 100]), jnp.array([True, False]))
    np.testing.assert_allclose(moments, [3, 4, 26])  # 9 + 1 + 16


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(1, 7), st.sampled_from([0.0, 10.0, 1000.0]))
def test_any_cut_of_a_stream_gives_the_moments_of_the_whole(seed, n_batches, offset):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(n_batches, 5)) * 3 + offset).astype(np.float32)
    valid = rng.integers(0, 2, (n_batches, 5)).astype(bool)
    moments = init_moments()
    for row, keep in zip(x, valid, strict=True):
        moments = update(moments, np.where(keep, row, NAN).astype(np.float32), keep)
    kept = x[valid].astype(np.float64)
    assert moments.count == len(kept)
    if len(kept):
        np.testing.assert_allclose(moments.mean, kept.mean(), rtol=1e-5, atol=1e-5)
        expected = ((kept - kept.mean()) ** 2).sum()
        np.testing.assert_allclose(moments.m2, expected, rtol=1e-3, atol=1e-3)


def test_nothing_valid_changes_nothing_and_nan_marked_valid_stays_out():
    before = update(init_moments(), f32([1, 3]), jnp.ones(2))
    after = update(before, f32([NAN, 7]), jnp.zeros(2))
    np.testing.assert_array_equal(after, before)
    after = update(before, f32([NAN, np.inf]), jnp.ones(2))
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(update(init_moments(), f32([NAN, NAN]), jnp.zeros(2)), [0, 0, 0])


def test_normalise_by_hand():
    moments = Moments(f32(4), f32(2), f32(36))  # standard deviation 3
    np.testing.assert_allclose(normalise_scores(f32([5, -1, 2]), moments), [1, -1, 0], rtol=1e-6)
    got = normalise_scores(f32([6, NAN]), moments, shift_mean=False)
    np.testing.assert_allclose(got, [2, NAN], rtol=1e-6)


@pytest.mark.parametrize("seen", [[], [5.0], [5.0, 5.0, 5.0]])
def test_scale_stays_one_until_a_spread_is_known(seen):
    moments = init_moments()
    if seen:
        moments = update_moments(moments, f32(seen), jnp.ones(len(seen)))
    centre = 5.0 if seen else 0.0
    np.testing.assert_allclose(normalise_scores(f32([7.0]), moments), [7 - centre])


def test_errors_name_the_argument():
    with pytest.raises(TypeError, match="x must be a float32"):
        update_moments(init_moments(), jnp.array([1]), jnp.ones(1))
    with pytest.raises(ValueError, match=r"valid \(3,\)"):
        update_moments(init_moments(), jnp.ones(2), jnp.ones(3))
    with pytest.raises(TypeError, match="scores must be a float32"):
        normalise_scores(jnp.array([1]), init_moments())
