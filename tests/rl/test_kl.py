"""KL estimators, their direction, their gradients, and the controllers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_numpy as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_jax.rl import kl

P, Q = np.array([0.8, 0.2]), np.array([0.5, 0.5])  # actor, reference
LOG_P, LOG_Q = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (P, Q))


def f32(x):
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("k1", [0.470004, -0.916291]),
        ("abs", [0.470004, 0.916291]),
        ("k2", [0.110452, 0.419794]),
        ("k3", [0.095004, 0.583709]),
    ],
)
def test_values_by_hand(kind, expected):
    np.testing.assert_allclose(kl.kl_estimate(LOG_P, LOG_Q, kind), expected, rtol=1e-5)


def test_k1_and_k3_average_to_the_kl_of_actor_against_reference():
    forward, backward = 0.192745, 0.223144
    for kind in ("k1", "k3"):
        assert np.isclose((P * kl.kl_estimate(LOG_P, LOG_Q, kind)).sum(), forward, rtol=1e-5)
    assert np.isclose(kl.full_kl(LOG_P, LOG_Q), forward, rtol=1e-5)
    assert np.isclose(kl.full_kl(LOG_Q, LOG_P), backward, rtol=1e-5)


@pytest.mark.parametrize("kind, expected", [("k1", 0.0), ("k2", 0.2218071), ("k3", 0.3)])
def test_expected_gradients(kind, expected):
    """Only k2's is the KL's own gradient, which full_kl gives exactly."""
    logits = LOG_P

    def loss(logits):
        return jnp.sum(f32(P) * kl.kl_estimate(jax.nn.log_softmax(logits), LOG_Q, kind))

    np.testing.assert_allclose(jax.grad(loss)(logits), [expected, -expected], atol=1e-6)
    true = jax.grad(kl.full_kl)(logits, LOG_Q)
    np.testing.assert_allclose(true, [0.2218071, -0.2218071], atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("delta", [100.0, -100.0, 20.0, -20.0, 1e4, -1e4])
def test_extreme_differences_stay_finite(kind, delta):
    value, slope = jax.value_and_grad(lambda d: kl.kl_estimate(d, f32(0.0), kind))(f32(delta))
    assert np.isfinite(value) and np.isfinite(slope)
    # Downhill must never lead further away from the reference.
    if kind != "k1":
        assert slope * np.sign(delta) >= 0


@pytest.mark.parametrize("delta", [1e-6, -1e-6, 1e-4, -1e-3, 0.02, 0.049, 0.0501, -0.0499, -0.0501])
def test_k3_is_exact_where_the_plain_formula_cancels(delta):
    delta = np.float32(delta)
    value, slope = jax.value_and_grad(lambda d: kl.kl_estimate(d, f32(0.0), "k3"))(f32(delta))
    exact = float(delta) ** 2 * sum(
        (-float(delta)) ** n / np.prod(range(1, n + 3)) for n in range(9)
    )
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    np.testing.assert_allclose(slope, -np.expm1(-float(delta)), rtol=1e-4)
    assert value > 0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from(["k1", "abs", "k2", "k3"]), st.floats(1e-3, 8))
def test_agrees_with_the_oracle(seed, kind, scale):
    rng = np.random.default_rng(seed)
    actor, ref = (rng.normal(size=(2, 3, 4)) * scale).astype(np.float32)
    got = kl.kl_estimate(actor, ref, kind)
    expected = np.vectorize(lambda a, b: oracle.kl(a, b, kind))(actor, ref)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_full_kl_agrees_with_the_oracle_and_skips_padded_vocabulary():
    rng = np.random.default_rng(0)
    actor, ref = rng.normal(size=(2, 3, 5)).astype(np.float32) * 3
    expected = [oracle.full_kl(a, b) for a, b in zip(actor, ref, strict=True)]
    np.testing.assert_allclose(kl.full_kl(actor, ref), expected, rtol=1e-5)
    pads = ((0, 0), (0, 3))
    padded = [jnp.pad(x, pads, constant_values=-np.inf) for x in (actor, ref)]
    step = jax.jit(jax.value_and_grad(lambda z: kl.full_kl(z, padded[1]).sum()))
    value, grad = step(padded[0])
    np.testing.assert_allclose(value, sum(expected), rtol=1e-5)
    numeric = oracle.gradient(
        lambda z: sum(oracle.full_kl(a, b) for a, b in zip(z, ref, strict=True)), actor
    )
    np.testing.assert_allclose(grad[:, :5], numeric, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(grad[:, 5:], 0)
    np.testing.assert_array_equal(kl.full_kl(actor, actor), 0)


def test_full_kl_is_infinite_where_only_the_reference_excludes_a_token():
    assert kl.full_kl(f32([0.0, 0.0]), f32([0.0, -np.inf])) == np.inf


def test_adaptive_coefficient_by_hand():
    update = functools.partial(kl.adaptive_kl_update, target=6.0, horizon=1000, n_samples=100)
    np.testing.assert_allclose(update(0.2, 6.6), 0.2 * 1.01, rtol=1e-6)  # error .1, share .1
    np.testing.assert_allclose(update(0.2, 60.0), 0.2 * 1.02, rtol=1e-6)  # error held at .2
    np.testing.assert_allclose(update(0.2, 0.0), 0.2 * 0.98, rtol=1e-6)
    np.testing.assert_allclose(update(0.2, 6.0), 0.2, rtol=1e-6)
    np.testing.assert_allclose(update(0.2, np.inf), 0.2 * 1.02, rtol=1e-6)
    np.testing.assert_allclose(update(0.2, np.nan), 0.2, rtol=1e-6)


@given(st.floats(0, 100), st.floats(0.1, 10), st.floats(1, 1e5), st.integers(1, 10**6))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_adaptive_coefficient_agrees_and_stays_positive(observed, target, horizon, n_samples):
    got = kl.adaptive_kl_update(0.3, observed, target=target, horizon=horizon, n_samples=n_samples)
    expected = oracle.adaptive_kl(0.3, observed, target, horizon, n_samples)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert got > 0


@pytest.mark.parametrize("seen, stop", [(0.14, False), (0.16, True), (np.nan, True)])
def test_early_stop(seen, stop):
    assert bool(kl.should_stop_early(f32(seen), 0.1)) is stop


def test_errors_name_the_argument():
    with pytest.raises(TypeError, match="ref_log_probs must be a float32"):
        kl.kl_estimate(f32([1]), jnp.ones(1, jnp.bfloat16), "k1")
    with pytest.raises(ValueError, match=r"logits \(5,\), ref_logits \(8,\)"):
        kl.full_kl(jnp.ones(5), jnp.ones(8))
    with pytest.raises(ValueError, match="k1, abs, k2, k3"):
        kl.kl_estimate(f32([1]), f32([1]), "k4")  # pyright: ignore
    with pytest.raises(ValueError, match="target must be positive"):
        kl.adaptive_kl_update(0.1, 1.0, target=0, horizon=1, n_samples=1)
    with pytest.raises(ValueError, match="horizon must be positive"):
        kl.adaptive_kl_update(0.1, 1.0, target=1, horizon=0, n_samples=1)
