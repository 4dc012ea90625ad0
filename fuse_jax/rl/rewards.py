"""From one score a sequence to one reward a token."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fuse_jax.rl.checks import require_float32, require_rows, require_same_shape


def clip_scores(scores: Float[Array, " N"], limit: float) -> Float[Array, " N"]:
    """Hold scores within [-limit, limit], so that one outlier cannot own the whitened batch.

    NaN stays NaN: exclude the sample by its mask.

    Args:
      scores: `[N]` float32.
      limit: positive Python number.

    Raises:
      TypeError: scores is not float32. ValueError: limit is not positive.
    """
    require_float32(scores=scores)
    if not limit > 0:
        raise ValueError(f"limit must be positive, got {limit}")
    return jnp.clip(scores, -limit, limit)


def missing_eos_penalty(
    scores: Float[Array, " N"], truncated: Shaped[Array, " N"], penalty: float
) -> Float[Array, " N"]:
    """Replace the score of a response cut off at the length cap.

        y = penalty if truncated else score

    The reward model's opinion of half a response is thrown away, not added to: otherwise a high
    score could buy off the missing end. `penalty` is the score itself, e.g. -3.0 with standardised
    scores, and so it comes after normalisation and clipping. A NaN score of a truncated sample
    becomes `penalty`; decide which samples are valid before calling this.

    Source: Stiennon et al. 2020, arXiv 2009.01325 and Huang et al. 2024, arXiv 2403.17031 (the "EOS
    trick").

    Args:
      scores: `[N]` float32.
      truncated: `[N]` bool, the response reached the cap without a stop token.
      penalty: the score given instead.

    Returns:
      `[N]` float32.

    Raises:
      TypeError: scores is not float32. ValueError: shapes differ.
    """
    require_float32(scores=scores)
    require_same_shape(scores=scores, truncated=truncated)
    return jnp.where(jnp.asarray(truncated) != 0, jnp.float32(penalty), scores)


def shape_rewards(
    scores: Float[Array, " B"],
    kl: Float[Array, "B R"],
    response_mask: Shaped[Array, "B R"],
    *,
    kl_coef: Float[Array, ""] | float,
) -> Float[Array, "B R"]:
    """Per-token rewards: a KL cost at every token, the score at the last one.

        r_t = -kl_coef * kl_t + score * [t is the last real token]

    The last real token is the stop token, or the last one before the cap: never the padding after
    it, where the score would be masked away. An empty response has no token to put a score on: its
    rewards are all 0.

    Source: Ouyang et al. 2022, arXiv 2203.02155, section 3.5; Ziegler et al. 2019, arXiv
    1909.08593.

    Args:
      scores: `[B]` float32, one a sequence.
      kl: `[B, R]` float32, per-token KL to the reference, from `kl.kl_estimate` of any kind.
      response_mask: `[B, R]`, nonzero for real tokens. Zero the row of a sample that is excluded
        (e.g. its score is NaN): its rewards become 0.
      kl_coef: scalar, Python number or array.

    Returns:
      `[B, R]` float32, 0 outside the mask.

    Raises:
      TypeError: scores or kl is not float32. ValueError: shapes differ.
    """
    require_float32(scores=scores, kl=kl)
    require_same_shape(kl=kl, response_mask=response_mask)
    require_rows(kl.shape[0], scores=scores)
    real = jnp.asarray(response_mask) != 0
    is_last = real & (jnp.cumsum(real[:, ::-1], axis=1)[:, ::-1] == 1)
    cost = -kl_coef * jnp.where(real, kl, 0.0)
    return jnp.where(real, cost, 0.0) + jnp.where(is_last, jnp.asarray(scores)[:, None], 0.0)
