"""Sums, means and whitening under a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_numpy as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from fuse_jax.rl import masked

whiten = jax.jit(masked.masked_whiten, static_argnames="shift_mean")
mean = jax.jit(masked.masked_mean)
NAN = np.nan


def f32(x):
    return jnp.asarray(x, jnp.float32)


def test_response_mask_comes_from_lengths():
    mask = masked.response_mask(jnp.array([2, 0, 4]), 4)
    assert mask.dtype == jnp.float32
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])


def test_response_mask_keeps_the_stop_token_when_pad_id_equals_stop_id():
    tokens = jnp.array([[5, 7, 2, 2, 2]])  # stop id = pad id = 2, response length 3
    mask = masked.response_mask(jnp.array([3]), tokens.shape[1])
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0, 0]])


def test_moments_and_whitening_count_real_entries_only():
    x = f32([[1, 3, NAN, 7], [2, 4, 6, NAN]])
    mask = f32([[1, 1, 0, 0], [1, 1, 1, 0]])
    average, variance = masked.masked_moments(x, mask)
    np.testing.assert_allclose(average, 3.2, rtol=1e-6)
    np.testing.assert_allclose(variance, 2.96, rtol=1e-6)
    expected = (np.array([1, 3, 2, 4, 6]) - 3.2) / np.sqrt(2.96)
    np.testing.assert_allclose(whiten(x, mask)[mask != 0], expected, rtol=1e-5)
    np.testing.assert_array_equal(whiten(x, mask)[mask == 0], 0)


def test_sum_and_mean_along_an_axis_and_of_nothing():
    x = f32([[1, 2, NAN], [NAN, NAN, NAN]])
    mask = f32([[1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(masked.masked_sum(x, mask, axis=1), [3, 0])
    np.testing.assert_array_equal(masked.masked_mean(x, mask, axis=1), [1.5, 0])
    assert masked.masked_sum(x, mask) == 3
    assert masked.masked_mean(x, mask) == 1.5
    assert masked.masked_mean(x, jnp.zeros_like(x)) == 0


@pytest.mark.parametrize("shift_mean, expected", [(True, 0.0), (False, 5.0)])
def test_one_valid_entry_is_finite(shift_mean, expected):
    out = whiten(f32([[5, NAN], [NAN, NAN]]), f32([[1, 0], [0, 0]]), shift_mean=shift_mean)
    np.testing.assert_array_equal(out, [[expected, 0], [0, 0]])


def test_no_valid_entry_gives_zeros():
    np.testing.assert_array_equal(whiten(f32([NAN, 1.0]), f32([0, 0])), [0, 0])


@pytest.mark.parametrize("value", [1.0, 0.1, 1000.1, -3.3e5])
def test_equal_entries_whiten_to_nothing(value):
    """The rounding error of the mean must not be scaled up into a signal."""
    x = jnp.full((37, 29), value, jnp.float32)
    assert np.abs(whiten(x, jnp.ones_like(x))).max() < 1e-4


def test_excluded_sample_does_not_shift_the_others():
    scores = f32([1, NAN, 0, 1])
    valid = jnp.array([True, False, True, True])
    np.testing.assert_allclose(masked.masked_mean(scores, valid), 2 / 3, rtol=1e-6)
    out = whiten(scores, valid)
    np.testing.assert_allclose(out, oracle.whiten(scores, valid), rtol=1e-5)
    assert out[1] == 0


def test_statistics_are_global_when_the_array_is_sharded():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.repeat([1.0, 5.0], 8).reshape(8, 2).astype(np.float32)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    out = whiten(sharded, jax.device_put(np.ones_like(x), sharded.sharding))
    np.testing.assert_allclose(out, (x - 3) / 2, atol=1e-6)


def test_whitening_groups_together_differs_from_each_alone():
    groups = f32([[0, 1], [10, 11]])
    ones = jnp.ones((2, 2), jnp.float32)
    together = whiten(groups, ones)
    apart = jnp.stack([whiten(g, o) for g, o in zip(groups, ones, strict=True)])
    np.testing.assert_allclose(together, oracle.whiten(groups, ones), rtol=1e-5)
    assert np.abs(together - apart).max() > 0.9


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 6), min_size=4, max_size=4), st.booleans())
def test_whitening_agrees_with_the_oracle(seed, lengths, shift_mean):
    rng = np.random.default_rng(seed)
    x = rng.normal(rng.normal() * 10, rng.uniform(0.1, 5), (4, 6)).astype(np.float32)
    mask = masked.response_mask(jnp.array(lengths), 6)
    expected = oracle.whiten(x, np.asarray(mask), shift_mean)
    dirty = jnp.where(mask != 0, x, NAN)
    np.testing.assert_allclose(
        whiten(dirty, mask, shift_mean=shift_mean), expected, rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        mean(dirty, mask), oracle.mean(x, np.asarray(mask)), rtol=1e-5, atol=1e-5
    )


def test_gradient_is_finite_and_zero_under_the_mask():
    x, mask = f32([[1, 3, NAN], [2, np.inf, NAN]]), f32([[1, 1, 0], [1, 0, 0]])
    target = f32([[1, 2, 3], [4, 5, 6]])
    grad = jax.jit(
        jax.grad(lambda x: masked.masked_sum(masked.masked_whiten(x, mask) * target, mask))
    )(x)
    clean = np.where(mask != 0, x, 0)
    expected = oracle.gradient(
        lambda x: (oracle.whiten(x, np.asarray(mask)) * np.asarray(target)).sum(), clean
    )
    np.testing.assert_allclose(grad, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(grad[mask == 0], 0)


@pytest.mark.parametrize("bad", [np.ones(3), np.ones(3, np.int32), jnp.ones(3, jnp.bfloat16)])
def test_wrong_dtype_names_the_argument(bad):
    with pytest.raises(TypeError, match="x must be a float32"):
        masked.masked_mean(bad, np.ones(3))


def test_shapes_do_not_broadcast():
    with pytest.raises(ValueError, match=r"x \(3, 3\), mask \(3,\)"):
        masked.masked_whiten(jnp.ones((3, 3)), jnp.ones(3))
