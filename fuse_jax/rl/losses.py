"""Losses of PPO, reward-model and supervised training, as sums over a denominator known beforehand.

Every loss takes `weights` and returns `sum(weights * per_token)`. `loss_weights` makes them from
the mask of the whole mini-batch, before it is cut into micro-batches or shards: any cut then adds
up to the same loss and gradient. A weight of 0 takes a token out entirely: whatever its inputs are,
value and gradient do not change by one bit. Metrics are sums with the same weights and add in the
same way, except those named `..._max` (see metrics.py).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fuse_jax.rl.checks import require_float32, require_same_shape
from fuse_jax.rl.kl import MAX_LOG_RATIO, kl_estimate

# Named again here because a loss is never used without its weights.
from fuse_jax.rl.weights import loss_totals as loss_totals
from fuse_jax.rl.weights import loss_weights as loss_weights
from fuse_jax.rl.weights import weighted_sum as weighted_sum

Metrics = dict[str, Float[Array, ""]]


def _clean(weights, *arrays):
    """The arrays with 0 wherever the weight is 0, before any arithmetic."""
    return [jnp.where(weights != 0, a, 0.0) for a in arrays]


def policy_loss(
    log_probs: Float[Array, "B R"],
    old_log_probs: Float[Array, "B R"],
    advantages: Float[Array, "B R"],
    weights: Float[Array, "B R"],
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """PPO's clipped surrogate, with a separate upper clip and an optional dual clip.

        ratio = exp(clip(log_probs - old_log_probs, -20, 20))
        J     = min(ratio A, clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high) A)
        J     = max(J, dual_clip A)  where A < 0, if dual_clip is given
        loss  = -sum(weights J)

    The log-ratio is bounded (kl.MAX_LOG_RATIO) before exp, because exp(100) * 0 is NaN forward and
    clipping after exp leaves inf * 0 backward. A token past the bound has gradient 0;
    `log_ratio_abs_max` shows it.

    Sources: PPO, arXiv 1707.06347, equation 7; clip-higher, DAPO, arXiv 2503.14476, section 3.1;
    dual clip, Ye et al. 2020, arXiv 1912.09729, equation 5.

    Args:
      log_probs: `[B, R]` float32, under the policy being trained. The only argument with a
        gradient.
      old_log_probs: `[B, R]` float32, under the policy that sampled, of the distribution really
        sampled.
      advantages: `[B, R]` float32, usually whitened.
      weights: `[B, R]` float32, from `loss_weights`.
      clip_eps_low, clip_eps_high: Python numbers; equal in plain PPO. 0 <= low <= 1, 0 <= high.
      dual_clip: bound on ratio * |A| for negative A, greater than 1 (3 in the paper); None = off.

    Returns:
      loss, float32 scalar, and metrics. Sums with the same weights, adding over micro-batches:
        clip_fraction: tokens whose clipped branch is the smaller one, so that they have no gradient
        dual_clip_fraction: tokens held by the dual clip (0 when off)
        approx_kl: k3 of KL(old || new)
        ratio_mean: mean ratio
      Maxima over tokens of nonzero weight, combined by max (0 when there are none):
        ratio_max, log_ratio_abs_max (before the bound)

    Raises:
      TypeError: an array is not float32. ValueError: shapes differ, or a clip value is out of
      range.
    """
    require_float32(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, weights=weights
    )
    require_same_shape(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, weights=weights
    )
    if not 0 <= clip_eps_low <= 1:
        raise ValueError(f"clip_eps_low must be within 0..1, got {clip_eps_low}")
    if not clip_eps_high >= 0:
        raise ValueError(f"clip_eps_high must not be negative, got {clip_eps_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be greater than 1, or None, got {dual_clip}")

    new, old, advantages = _clean(weights, log_probs, old_log_probs, advantages)
    old, advantages = jax.lax.stop_gradient((old, advantages))
    log_ratio = new - old
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    free = ratio * advantages
    clipped = jnp.clip(ratio, 1.0 - clip_eps_low, 1.0 + clip_eps_high) * advantages
    objective = jnp.minimum(free, clipped)
    dual_held = jnp.zeros_like(ratio, bool)
    if dual_clip is not None:
        floor = dual_clip * advantages
        dual_held = (advantages < 0) & (objective < floor)
        objective = jnp.where(dual_held, floor, objective)

    metrics = {
        "clip_fraction": jnp.sum(weights * (clipped < free)),
        "dual_clip_fraction": jnp.sum(weights * dual_held),
        "approx_kl": jnp.sum(weights * kl_estimate(old, new, "k3")),
        "ratio_mean": jnp.sum(weights * ratio),
        "ratio_max": jnp.max(jnp.where(weights != 0, ratio, 0.0), initial=0.0),
        "log_ratio_abs_max": jnp.max(jnp.abs(log_ratio), initial=0.0),
    }
    return -jnp.sum(weights * objective), jax.lax.stop_gradient(metrics)


def value_loss(
    values: Float[Array, "B R"],
    old_values: Float[Array, "B R"],
    returns: Float[Array, "B R"],
    weights: Float[Array, "B R"],
    *,
    value_clip_eps: float | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Half the squared error of the critic, or the worse of its free and clipped predictions'.

        v_clip = clip(values, old_values - value_clip_eps, old_values + value_clip_eps)
        loss   = sum(weights * max((values - returns)^2, (v_clip - returns)^2)) / 2

    Source: OpenAI baselines' PPO2; see Engstrom et al. 2020, arXiv 2005.12729.

    Args:
      values: `[B, R]` float32, of the critic being trained. The only argument with a gradient.
      old_values: `[B, R]` float32, the values that were recorded with the rollout (not recomputed
        ones, which would make the clip a no-op).
      returns: `[B, R]` float32, from `gae`: not the advantages.
      weights: `[B, R]` float32, from `loss_weights`.
      value_clip_eps: positive Python number; None = no clip.

    Returns:
      loss, float32 scalar, and metrics, sums with the same weights:
        value_clip_fraction: tokens whose clipped error is the larger one (0 when off)
        value_error_sq: squared error (values - returns)^2
        value_mean, return_mean, return_sq: for the explained variance,
          1 - value_error_sq / (return_sq - return_mean^2) once summed over a whole mini-batch

    Raises:
      TypeError: an array is not float32. ValueError: shapes differ, or value_clip_eps is not
      positive.
    """
    require_float32(values=values, old_values=old_values, returns=returns, weights=weights)
    require_same_shape(values=values, old_values=old_values, returns=returns, weights=weights)
    if value_clip_eps is not None and not value_clip_eps > 0:
        raise ValueError(f"value_clip_eps must be positive, or None, got {value_clip_eps}")
    values, old_values, returns = _clean(weights, values, old_values, returns)
    old_values, returns = jax.lax.stop_gradient((old_values, returns))
    free = jnp.square(values - returns)
    error = free
    if value_clip_eps is not None:
        # Clipping the value itself, and not its step, leaves an unclipped one exactly as it is.
        held = jnp.clip(values, old_values - value_clip_eps, old_values + value_clip_eps)
        error = jnp.maximum(free, jnp.square(held - returns))
    metrics = {
        "value_clip_fraction": jnp.sum(weights * (error > free)),
        "value_error_sq": jnp.sum(weights * free),
        "value_mean": jnp.sum(weights * values),
        "return_mean": jnp.sum(weights * returns),
        "return_sq": jnp.sum(weights * jnp.square(returns)),
    }
    return 0.5 * jnp.sum(weights * error), jax.lax.stop_gradient(metrics)


def entropy_bonus(entropy: Float[Array, "B R"], weights: Float[Array, "B R"]) -> Float[Array, ""]:
    """Weighted entropy of the policy, to be subtracted from the loss.

        sum(weights * H),   H_t = -sum_v p_v log p_v

    Args:
      entropy: `[B, R]` float32, nats, of the next-token distribution at each response token.
      weights: `[B, R]` float32, from `loss_weights`.

    Returns:
      float32 scalar, positive for a positive entropy: `loss - entropy_coef * entropy_bonus(...)`.

    Raises:
      TypeError: not float32. ValueError: shapes differ.
    """
    require_float32(entropy=entropy, weights=weights)
    return weighted_sum(entropy, weights)


def kl_loss(
    log_probs: Float[Array, "B R"],
    ref_log_probs: Float[Array, "B R"],
    weights: Float[Array, "B R"],
    *,
    kind: Literal["k2", "k3"],
) -> Float[Array, ""]:
    """KL to the reference as a term of the loss (instead of a cost in the reward).

        sum(weights * k(log_probs, ref_log_probs))

    What an estimator's value and what its gradient estimate are two things. With d = log p - log q
    and E[grad log p] = 0 under the sampling policy p:

        k1: E[grad k1] = E[grad log p] = 0              only noise, no pull at all: refused
        k2: E[grad k2] = E[d grad log p] = grad KL(p || q)              the wanted gradient
        k3: E[grad k3] = E[(1 - q/p) grad log p] = grad KL(q || p)      the other direction

    k3 agrees with the wanted one only while p is close to q, and q/p can be huge for rare tokens.
    All three hold on-policy; after the first update step of an iteration they are biased, as no
    importance ratio is applied. The abs kind is refused too: its gradient is that of the total
    variation distance. The exact KL is `weighted_sum(full_kl(logits, ref_logits), weights)`.

    Source: J. Schulman, "Approximating KL Divergence", 2020; Tang and Munos 2025, arXiv 2506.09477.

    Args:
      log_probs: `[B, R]` float32, of the sampled tokens under the policy being trained.
      ref_log_probs: `[B, R]` float32, under the reference; no gradient.
      weights: `[B, R]` float32, from `loss_weights`.
      kind: "k2" (recommended) or "k3".

    Returns:
      float32 scalar.

    Raises:
      TypeError: not float32. ValueError: shapes differ, or the kind is not k2 or k3.
    """
    if kind not in ("k2", "k3"):
        raise ValueError(
            f"kind must be k2 or k3 in a loss, got {kind!r}: the expected gradient of k1 is 0 and "
            "that of abs is not the KL's; put the KL into the reward, or use k2"
        )
    require_float32(log_probs=log_probs, ref_log_probs=ref_log_probs, weights=weights)
    require_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, weights=weights)
    new, ref = _clean(weights, log_probs, ref_log_probs)
    return jnp.sum(weights * kl_estimate(new, jax.lax.stop_gradient(ref), kind))


def bradley_terry_loss(
    chosen_scores: Float[Array, " N"],
    rejected_scores: Float[Array, " N"],
    weights: Float[Array, " N"],
    *,
    margin: Float[Array, " N"] | None = None,
    score_l2: float = 0.0,
) -> tuple[Float[Array, ""], Metrics]:
    """Negative log-likelihood that the chosen response wins its pair.

        loss = sum(weights * (-log sigmoid(c - r - margin) + score_l2 * (c^2 + r^2) / 2))

    Only c - r matters to the first term; the second keeps the scores near 0 so that they can be
    compared across prompts. One score a sequence, read at its last token, so padding and length
    stay out of the loss.

    Sources: Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, equation 1; margin,
    Touvron et al. 2023, arXiv 2307.09288, equation 2.

    Args:
      chosen_scores, rejected_scores: `[N]` float32.
      weights: `[N]` float32, e.g. 1 / number of real pairs, 0 for pad pairs.
      margin: `[N]` float32, how much better the chosen one is; None = 0.
      score_l2: Python number, not negative.

    Returns:
      loss, float32 scalar, and metrics, sums with the same weights:
        accuracy: pairs with c > r, a tie counting one half
        score_margin: c - r
        score_mean: (c + r) / 2

    Raises:
      TypeError: an array is not float32. ValueError: shapes differ.
    """
    if margin is None:
        margin = jnp.zeros_like(chosen_scores)
    arrays = {
        "chosen_scores": chosen_scores,
        "rejected_scores": rejected_scores,
        "weights": weights,
        "margin": margin,
    }
    require_float32(**arrays)
    require_same_shape(**arrays)
    chosen, rejected, margin = _clean(weights, chosen_scores, rejected_scores, margin)
    difference = chosen - rejected
    per_pair = jax.nn.softplus(margin - difference)
    per_pair = per_pair + score_l2 * 0.5 * (jnp.square(chosen) + jnp.square(rejected))
    metrics = {
        "accuracy": jnp.sum(weights * (0.5 + 0.5 * jnp.sign(difference))),
        "score_margin": jnp.sum(weights * difference),
        "score_mean": jnp.sum(weights * 0.5 * (chosen + rejected)),
    }
    return jnp.sum(weights * per_pair), jax.lax.stop_gradient(metrics)


def next_token_loss(
    log_probs: Float[Array, "B R"], weights: Float[Array, "B R"]
) -> Float[Array, ""]:
    """Cross-entropy of supervised training.

        -sum(weights * log_probs)

    Args:
      log_probs: `[B, R]` float32, of the target tokens.
      weights: `[B, R]` float32, from `loss_weights` over the answer's tokens.

    Returns:
      float32 scalar, nats.

    Raises:
      TypeError: not float32. ValueError: shapes differ.
    """
    require_float32(log_probs=log_probs, weights=weights)
    require_same_shape(log_probs=log_probs, weights=weights)
    return -weighted_sum(log_probs, weights)
