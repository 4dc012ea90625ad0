"""Losses against numbers done by hand, the numpy oracle and its finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_numpy as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_jax.rl import losses

NAN = np.nan
EPS = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
EXAMPLES = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def f32(x):
    return jnp.asarray(x, jnp.float32)


def draw(seed, n_arrays, scale=0.5):
    """Arrays `[4, 6]` and weights with holes, all float32 numpy."""
    rng = np.random.default_rng(seed)
    arrays = (rng.normal(size=(n_arrays, 4, 6)) * scale).astype(np.float32)
    mask = rng.integers(0, 2, (4, 6)).astype(np.float32)
    weights = np.asarray(losses.loss_weights(mask, "token_mean"))
    return [*arrays, weights]


def check(got, expected):
    """Loss and metrics of both sides."""
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
    assert got[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@functools.cache
def compiled(f, **static):
    """One compilation a loss: value, metrics and gradient by its first argument."""
    return jax.jit(jax.value_and_grad(functools.partial(f, **static), has_aux=True))


def policy(log_ratio, advantage, **kwargs):
    """(loss, metrics) and gradient of one token; clip values 0.2 and 0.28 unless given."""
    one = f32([1.0])
    step = compiled(losses.policy_loss, **(EPS | kwargs))
    return step(f32([log_ratio]), 0 * one, f32([advantage]), one)


# -- policy loss


@pytest.mark.parametrize(
    "ratio, advantage, expected, clipped",
    [
        (1.0, 2.0, -2.0, 0),
        (1.25, 2.0, -2.5, 0),  # below the upper clip of 1.28
        (1.5, 2.0, -2.56, 1),
        (0.5, 2.0, -1.0, 0),  # moving back towards 1 is never clipped
        (0.5, -2.0, 1.6, 1),  # lower clip at 0.8
        (1.5, -2.0, 3.0, 0),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, expected, clipped):
    (loss, metrics), _ = policy(np.log(ratio), advantage)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert metrics["clip_fraction"] == clipped
    np.testing.assert_allclose(metrics["ratio_max"], ratio, rtol=1e-6)
    np.testing.assert_allclose(metrics["log_ratio_abs_max"], abs(np.log(ratio)), rtol=1e-6)
    # KL(old || new) by k3: (ratio - 1) - log(ratio)
    np.testing.assert_allclose(
        metrics["approx_kl"], ratio - 1 - np.log(ratio), rtol=1e-5, atol=1e-7
    )


def test_dual_clip_bounds_a_bad_action_that_became_likely():
    (loss, metrics), grad = policy(np.log(10.0), -2.0, dual_clip=3.0)
    assert loss == 6.0 and metrics["dual_clip_fraction"] == 1 and grad == 0
    assert np.isclose(policy(np.log(2.0), -2.0, dual_clip=3.0)[0][0], 4.0)
    assert np.isclose(policy(np.log(10.0), 2.0, dual_clip=3.0)[0][0], -2.56)


def test_ratio_is_taken_against_the_recorded_log_probs():
    one = f32([1.0])
    (loss, _), _ = compiled(losses.policy_loss, **EPS)(f32([-0.5]), f32([-1.0]), -one, one)
    np.testing.assert_allclose(loss, 1.6487213, rtol=1e-6)


def test_nan_beneath_a_zero_weight_is_not_there():
    mask = f32([[1, 0]])
    step = compiled(losses.policy_loss, **EPS)
    (value, _), grad = step(f32([[0, 0]]), f32([[0, NAN]]), mask, mask)
    assert value == -1
    np.testing.assert_array_equal(grad, [[-1, 0]])


@pytest.mark.parametrize("delta", [100.0, -100.0, 1e30, -np.inf])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_extreme_ratios_stay_finite(delta, advantage, dual_clip):
    (value, _), grad = policy(delta, advantage, dual_clip=dual_clip)
    assert np.isfinite(value) and np.isfinite(grad)
    if advantage == 0:
        assert value == 0 and grad == 0


@EXAMPLES
@given(seeds, st.sampled_from([None, 1.5]))
def test_policy_loss_agrees_with_the_oracle(seed, dual_clip):
    *arrays, weights = draw(seed, 3)
    dirty = [np.where(weights != 0, a, NAN).astype(np.float32) for a in arrays]
    got, grad = compiled(losses.policy_loss, dual_clip=dual_clip, **EPS)(*dirty, weights)
    check(got, oracle.policy_loss(*arrays, weights, 0.2, 0.28, dual_clip))
    expected = oracle.gradient(
        lambda x: oracle.policy_loss(x, *arrays[1:], weights, 0.2, 0.28, dual_clip)[0], arrays[0]
    )
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


def test_policy_loss_moves_only_the_new_log_probs():
    log_probs, old, advantages, weights = draw(0, 3)
    f = functools.partial(losses.policy_loss, **EPS)
    grads, _ = jax.jit(jax.grad(f, argnums=(1, 2), has_aux=True))(
        log_probs, old, advantages, weights
    )
    np.testing.assert_array_equal(grads, np.zeros((2, 4, 6)))


def test_zero_advantages_count_in_the_denominator_and_pull_nowhere():
    mask = f32([[1, 1], [1, 1]])
    weights = losses.loss_weights(mask, "token_mean")
    advantages = f32([[0, 0], [1, 1]])
    zeros = jnp.zeros((2, 2), jnp.float32)
    (value, _), grad = compiled(losses.policy_loss, **EPS)(zeros, zeros, advantages, weights)
    assert value == -0.5
    np.testing.assert_array_equal(grad, [[0, 0], [-0.25, -0.25]])


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"clip_eps_low": 1.1}, "clip_eps_low must be within 0..1"),
        ({"clip_eps_high": -0.1}, "clip_eps_high must not be negative"),
        ({"dual_clip": 1.0}, "dual_clip must be greater than 1"),
    ],
)
def test_policy_loss_refuses_clip_values_that_make_no_sense(bad, message):
    with pytest.raises(ValueError, match=message):
        policy(0.0, 1.0, **bad)


# -- value loss


def test_value_loss_by_hand():
    one = f32([1.0])
    value, metrics = losses.value_loss(0.5 * one, 0 * one, one, one, value_clip_eps=0.2)
    np.testing.assert_allclose(value, 0.32, rtol=1e-6)  # the worse of .5^2 and .8^2, halved
    assert metrics["value_clip_fraction"] == 1
    assert losses.value_loss(0.5 * one, 0 * one, one, one)[0] == 0.125


def test_an_unclipped_value_is_not_counted_as_clipped_by_rounding():
    rng = np.random.default_rng(0)
    values, returns = rng.normal(size=(2, 4, 6)).astype(np.float32)
    old = values + rng.uniform(-0.19, 0.19, (4, 6)).astype(np.float32)
    weights = np.full((4, 6), 1 / 24, np.float32)
    step = compiled(losses.value_loss, value_clip_eps=0.2)
    clipped, grad = step(values, old, returns, weights)
    free, free_grad = compiled(losses.value_loss, value_clip_eps=None)(
        values, old, returns, weights
    )
    assert clipped[1]["value_clip_fraction"] == 0 and clipped[0] == free[0]
    np.testing.assert_array_equal(grad, free_grad)


@EXAMPLES
@given(seeds, st.sampled_from([None, 0.2]))
def test_value_loss_agrees_with_the_oracle(seed, clip):
    *arrays, weights = draw(seed, 3)
    dirty = [np.where(weights != 0, a, NAN).astype(np.float32) for a in arrays]
    got, grad = compiled(losses.value_loss, value_clip_eps=clip)(*dirty, weights)
    check(got, oracle.value_loss(*arrays, weights, clip))
    expected = oracle.gradient(
        lambda x: oracle.value_loss(x, *arrays[1:], weights, clip)[0], arrays[0]
    )
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


def test_explained_variance_from_the_metrics():
    values, returns, weights = draw(3, 2)
    _, m = losses.value_loss(values, values, returns, weights)
    kept = weights != 0
    got = 1 - m["value_error_sq"] / (m["return_sq"] - m["return_mean"] ** 2)
    expected = 1 - ((values - returns)[kept] ** 2).mean() / returns[kept].var()
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_value_clip_must_be_positive():
    one = f32([1.0])
    with pytest.raises(ValueError, match="value_clip_eps must be positive"):
        losses.value_loss(one, one, one, one, value_clip_eps=0.0)


# -- KL, entropy, pairs, next token


@pytest.mark.parametrize("kind", ["k1", "abs", "full"])
def test_kl_loss_refuses_kinds_whose_gradient_is_not_the_kl(kind):
    one = f32([1.0])
    with pytest.raises(ValueError, match="k2 or k3 in a loss"):
        losses.kl_loss(one, one, one, kind=kind)


@EXAMPLES
@given(seeds, st.sampled_from(["k2", "k3"]))
def test_kl_loss_agrees_with_the_oracle(seed, kind):
    log_probs, ref, weights = draw(seed, 2, scale=1.0)
    dirty = [np.where(weights != 0, a, NAN).astype(np.float32) for a in (log_probs, ref)]
    f = compiled(_kl_with_aux, kind=kind)
    (value, _), grad = f(*dirty, weights)
    np.testing.assert_allclose(
        value, oracle.kl_loss(log_probs, ref, weights, kind), rtol=1e-5, atol=1e-7
    )
    expected = oracle.gradient(lambda x: oracle.kl_loss(x, ref, weights, kind), log_probs)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


def _kl_with_aux(log_probs, ref_log_probs, weights, kind):
    return losses.kl_loss(log_probs, ref_log_probs, weights, kind=kind), None


def test_kl_loss_has_no_gradient_by_the_reference():
    log_probs, ref, weights = draw(0, 2)
    grad = jax.grad(lambda r: losses.kl_loss(log_probs, r, weights, kind="k2"))(ref)
    np.testing.assert_array_equal(grad, np.zeros((4, 6)))


def test_entropy_of_two_tokens_and_three_pads():
    entropy = f32([1, 1, -1, NAN, np.inf])
    assert losses.entropy_bonus(entropy, f32([1, 1, 0, 0, 0])) == 2


@pytest.mark.parametrize(
    "chosen, rejected, margin, expected",
    [
        (0.0, 0.0, None, 0.693147),
        (2.0, 1.0, None, 0.313262),
        (1.0, 2.0, None, 1.313262),
        (2.0, 1.0, 1.0, 0.693147),
    ],
)
def test_bradley_terry_by_hand(chosen, rejected, margin, expected):
    one = f32([1.0])
    margin = None if margin is None else margin * one
    loss, metrics = losses.bradley_terry_loss(chosen * one, rejected * one, one, margin=margin)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert metrics["accuracy"] == (0.5 if chosen == rejected else float(chosen > rejected))


def test_bradley_terry_is_finite_at_extremes_and_blind_to_pad_pairs():
    step = compiled(losses.bradley_terry_loss, score_l2=0.0)
    (value, _), grad = step(f32([1e4, -1e4, NAN]), f32([0, 0, NAN]), f32([0.5, 0.5, 0]))
    np.testing.assert_allclose(value, 5000, rtol=1e-6)
    np.testing.assert_allclose(grad, [0, -0.5, 0])


@EXAMPLES
@given(seeds, st.booleans(), st.sampled_from([0.0, 0.01]))
def test_bradley_terry_agrees_with_the_oracle(seed, with_margin, score_l2):
    chosen, rejected, margin, weights = (a[0] for a in draw(seed, 3, scale=2.0))
    margin = np.abs(margin) if with_margin else None
    f = compiled(losses.bradley_terry_loss, score_l2=score_l2)
    dirty = [np.where(weights != 0, a, NAN).astype(np.float32) for a in (chosen, rejected)]
    got, grad = f(*dirty, weights, margin=margin)
    check(got, oracle.bradley_terry_loss(chosen, rejected, weights, margin, score_l2))
    expected = oracle.gradient(
        lambda x: oracle.bradley_terry_loss(x, rejected, weights, margin, score_l2)[0], chosen
    )
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


def test_next_token_loss_by_hand():
    loss = losses.next_token_loss(f32([[-1, -2, NAN]]), f32([[0.5, 0.5, 0]]))
    assert loss == 1.5


# -- what all of them refuse

ONES = np.ones((2, 3), np.float32)
CALLS = {
    "policy_loss": (functools.partial(losses.policy_loss, **EPS), 4),
    "value_loss": (losses.value_loss, 4),
    "entropy_bonus": (losses.entropy_bonus, 2),
    "kl_loss": (functools.partial(losses.kl_loss, kind="k2"), 3),
    "bradley_terry_loss": (losses.bradley_terry_loss, 3),
    "next_token_loss": (losses.next_token_loss, 2),
    "weighted_sum": (losses.weighted_sum, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_loss_refuses_other_dtypes_and_shapes_in_every_argument(name):
    f, n = CALLS[name]
    f(*[ONES] * n)
    for i in range(n):
        half = [ONES.astype(jnp.bfloat16) if j == i else ONES for j in range(n)]
        with pytest.raises(TypeError, match="must be a float32 array, got bfloat16"):
            f(*half)
        # Would broadcast without a word if it were let in.
        column = [ONES[:, :1] if j == i else ONES for j in range(n)]
        with pytest.raises(ValueError, match="one shape"):
            f(*column)
