"""Running mean and variance of scores, merged batch by batch."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fuse_jax.rl.checks import require_float32, require_same_shape
from fuse_jax.rl.masked import masked_moments


class Moments(NamedTuple):
    """What has been seen so far: a pytree of float32 scalars, to be checkpointed.

    m2 is the sum of squared distances from the mean; the population variance is m2 / count. The
    count is exact up to 2^24 samples.
    """

    count: Float[Array, ""]
    mean: Float[Array, ""]
    m2: Float[Array, ""]


def init_moments() -> Moments:
    """Moments of nothing."""
    return Moments(*(jnp.zeros((), jnp.float32) for _ in range(3)))


def update_moments(
    moments: Moments, x: Float[Array, "..."], valid: Shaped[Array, "..."]
) -> Moments:
    """Merge a batch into the running moments.

        n = n_a + n_b,   d = mean_b - mean_a
        mean = mean_a + d n_b / n
        m2   = m2_a + m2_b + d^2 n_a n_b / n

    so any cut of a stream into batches gives the same moments up to rounding. Samples that are not
    valid or
    not finite stay out: one NaN would stay for the rest of the run. `count` shows how many went in.
    A batch without a single one leaves the moments as they are.

    Source: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
    sample variances".

    Args:
      moments: so far.
      x: float32, any shape, e.g. scores `[N]` of training prompts.
      valid: same shape, nonzero = counts.

    Returns:
      the merged `Moments`.

    Raises:
      TypeError: x is not float32. ValueError: the shapes differ.
    """
    require_float32(x=x)
    require_same_shape(x=x, valid=valid)
    keep = (jnp.asarray(valid) != 0) & jnp.isfinite(x)
    n_b = jnp.sum(keep).astype(jnp.float32)
    mean_b, variance_b = masked_moments(x, keep)
    count = moments.count + n_b
    share = n_b / jnp.maximum(count, 1.0)
    d = jnp.where(n_b > 0, mean_b - moments.mean, 0.0)
    return Moments(
        count=count,
        mean=moments.mean + d * share,
        m2=moments.m2 + variance_b * n_b + jnp.square(d) * moments.count * share,
    )


def normalise_scores(
    scores: Float[Array, " N"], moments: Moments, *, shift_mean: bool = True, eps: float = 1e-8
) -> Float[Array, " N"]:
    """Scores in units of the running standard deviation.

        y = (x - mean) / sqrt(m2 / count + eps)

    With fewer than two samples seen, or no spread among them, nothing is known of the scale and it
    stays 1. NaN stays NaN: exclude the sample by its mask.

    Args:
      scores: `[N]` float32.
      moments: from `update_moments`, of training prompts only.
      shift_mean: subtract the running mean; False only rescales.
      eps: added to the variance.

    Returns:
      `[N]` float32.

    Raises:
      TypeError: scores is not float32.
    """
    require_float32(scores=scores)
    variance = moments.m2 / jnp.maximum(moments.count, 1.0)
    known = (moments.count >= 2) & (variance > 0)
    scale = jnp.where(known, jnp.sqrt(jnp.where(known, variance, 1.0) + eps), 1.0)
    return (scores - moments.mean if shift_mean else scores) / scale
