"""Kullback-Leibler divergence between actor and reference: estimators, coefficient, early stop.

Direction throughout, with tokens sampled from the actor:

    KL(actor || reference) = E[log actor(token) - log reference(token)]
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fuse_jax.rl.checks import require_float32, require_same_shape

KLKind = Literal["k1", "abs", "k2", "k3"]

# Largest |log-ratio| ever exponentiated: exp(20) = 4.9e8 is far from overflow. Beyond it the value
# saturates and the gradient is 0, where exp(100) = inf would give inf * 0 = NaN in both directions.
MAX_LOG_RATIO = 20.0

# Below this |log-ratio| the series of k3 is more exact in float32: exp(-d) - 1 + d cancels there.
_K3_SERIES_BELOW = 0.05


def kl_estimate(
    log_probs: Float[Array, "..."], ref_log_probs: Float[Array, "..."], kind: KLKind
) -> Float[Array, "..."]:
    """Per-token estimate of KL(actor || reference) from the sampled tokens alone.

        d = log_probs - ref_log_probs
        k1 = d                     unbiased; negative for about half of the tokens
        abs = |d|                  an upper bound of k1's mean, not an estimate of the KL
        k2 = d^2 / 2               biased, low variance, never negative
        k3 = exp(-d) - 1 + d       unbiased, low variance, never negative

    (unbiased when the tokens were sampled from `log_probs`' own distribution). The value is what
    belongs in a reward or a log; k1 is the usual one in a reward, k3 can be huge for a rare token.
    For a gradient read `kl_loss` first. In k3, d is held at -MAX_LOG_RATIO from below, in both of
    its terms: value and gradient stay finite, and the gradient there is 0, not of the wrong sign.

    Source: J. Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html

    Args:
      log_probs: float32, any shape, log-probabilities of the sampled tokens under the actor.
      ref_log_probs: same shape and dtype, under the reference.
      kind: which estimator. Use one kind for the trained and for the logged KL.

    Returns:
      float32, nats, same shape. No mask is applied: whatever sums it must leave padding out.

    Raises:
      TypeError: not float32. ValueError: shapes differ, or the kind is unknown.
    """
    require_float32(log_probs=log_probs, ref_log_probs=ref_log_probs)
    require_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    delta = jnp.subtract(log_probs, ref_log_probs)
    if kind == "k1":
        return delta
    if kind == "abs":
        return jnp.abs(delta)
    if kind == "k2":
        return 0.5 * jnp.square(delta)
    if kind == "k3":
        return _k3(delta)
    raise ValueError(f"kind must be one of k1, abs, k2, k3, got {kind!r}")


def _k3(delta: Float[Array, "..."]) -> Float[Array, "..."]:
    bounded = jnp.maximum(delta, -MAX_LOG_RATIO)
    small = jnp.abs(delta) < _K3_SERIES_BELOW
    # Each branch gets an input that is harmless to it: both are differentiated.
    s = jnp.where(small, delta, 0.0)
    series = 0.5 * jnp.square(s) * (1.0 - s / 3.0 + jnp.square(s) / 12.0)
    b = jnp.where(small, 1.0, bounded)
    return jnp.where(small, series, jnp.expm1(-b) + b)


def full_kl(
    logits: Float[Array, "... V"], ref_logits: Float[Array, "... V"]
) -> Float[Array, "..."]:
    """Exact KL(actor || reference) of the next-token distributions.

        sum_v p_v (log p_v - log q_v),   p = softmax(logits), q = softmax(ref_logits)

    Its gradient is the KL's own. A token the actor cannot emit (logit -inf, e.g. vocabulary
    padding) adds 0; one the actor can emit and the reference cannot makes the result infinite, as
    it should.

    Args:
      logits: `[..., V]` float32, already divided by the sampling temperature, padding ids at -inf.
      ref_logits: same shape and dtype, treated the same way.

    Returns:
      `[...]` float32, nats.

    Raises:
      TypeError: not float32. ValueError: shapes differ.
    """
    require_float32(logits=logits, ref_logits=ref_logits)
    require_same_shape(logits=logits, ref_logits=ref_logits)
    possible = logits > -jnp.inf
    log_p = jax.nn.log_softmax(logits, axis=-1)
    log_q = jax.nn.log_softmax(ref_logits, axis=-1)
    # (-inf) - (-inf) is NaN, so impossible tokens are cleaned before the difference is taken.
    difference = jnp.where(possible, log_p, 0.0) - jnp.where(possible, log_q, 0.0)
    return jnp.sum(jnp.where(possible, jnp.exp(log_p), 0.0) * difference, axis=-1)


def adaptive_kl_update(
    kl_coef: Float[Array, ""] | float,
    observed_kl: Float[Array, ""] | float,
    *,
    target: float,
    horizon: float,
    n_samples: float,
) -> Float[Array, ""]:
    """Move the KL coefficient towards the one that holds the KL at its target.

        e    = clip(observed_kl / target - 1, -0.2, 0.2)
        coef = kl_coef * (1 + e * min(n_samples / horizon, 1))

    `horizon` is the number of samples over which a persistent error of 20 % or more changes the
    coefficient by about 20 %. The ratio is capped at 1 so that a batch larger than the horizon
    cannot turn the coefficient negative. An `observed_kl` of NaN leaves the coefficient as it is.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2 (log-space proportional controller).

    Args:
      kl_coef: current coefficient, scalar.
      observed_kl: scalar, nats a sequence (per-token KL summed over each response, then averaged
        over them).
      target: wanted KL in the same unit; positive Python number.
      horizon: in samples; positive Python number.
      n_samples: sequences that `observed_kl` was averaged over.

    Returns:
      the new coefficient, float32 scalar.

    Raises:
      ValueError: target or horizon is not positive.
    """
    if not target > 0:
        raise ValueError(f"target must be positive, got {target}")
    if not horizon > 0:
        raise ValueError(f"horizon must be positive, got {horizon}")
    kl_coef = jnp.asarray(kl_coef, jnp.float32)
    error = jnp.clip(jnp.asarray(observed_kl, jnp.float32) / target - 1.0, -0.2, 0.2)
    updated = kl_coef * (1.0 + error * jnp.minimum(n_samples / horizon, 1.0))
    return jnp.where(jnp.isnan(error), kl_coef, updated)


def should_stop_early(
    approx_kl: Float[Array, ""] | float, target_kl: float, *, factor: float = 1.5
) -> Bool[Array, ""]:
    """Whether to leave the rest of this iteration's update steps undone.

        stop = not (approx_kl <= factor * target_kl)

    written so that a NaN stops. `approx_kl` compares the policy being trained with the one that
    sampled (the `approx_kl` of `policy_loss`, nats a token in token_mean), not with the reference.

    Source: the 1.5 and the rule follow OpenAI's Spinning Up PPO (2018).

    Args:
      approx_kl: scalar, mean k3 over the last mini-batch.
      target_kl: the KL an iteration is meant to stay at, same unit.
      factor: head-room over the target.

    Returns:
      bool scalar.
    """
    return jnp.logical_not(jnp.asarray(approx_kl, jnp.float32) <= factor * target_kl)
