"""Sums, means and whitening over the entries a mask keeps.

A mask is bool or 0/1 in any number type; any nonzero entry counts as one. Inputs are cleaned with
`where` before any arithmetic, because 0 * NaN is NaN, forward and backward.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from fuse_jax.rl.checks import require_float32, require_same_shape


def response_mask(response_lengths: Int[Array, " B"], R: int) -> Float[Array, "B R"]:
    """1 for each token of a response, its stop token included; 0 for padding.

        mask[b, t] = 1 if t < response_lengths[b] else 0

    Made from lengths and never from token ids: the pad id may equal a stop id, and a prompt may
    hold either.

    Args:
      response_lengths: `[B]` integers in 0..R; 0 gives an empty row.
      R: padded response length, a Python int.

    Returns:
      `[B, R]` float32.
    """
    return (jnp.arange(R) < jnp.asarray(response_lengths)[:, None]).astype(jnp.float32)


def masked_sum(
    x: Float[Array, "..."], mask: Shaped[Array, "..."], *, axis: int | None = None
) -> Float[Array, "..."]:
    """Sum of the entries the mask keeps.

        sum_i x_i over mask_i != 0

    Args:
      x: float32, any shape. Entries outside the mask may be anything.
      mask: same shape as x.
      axis: the axis to sum over, e.g. 1 for one sum a sequence; all axes when None.

    Returns:
      float32, a scalar when `axis` is None; 0 where the mask is empty.

    Raises:
      TypeError: x is not float32. ValueError: the shapes differ.
    """
    require_float32(x=x)
    require_same_shape(x=x, mask=mask)
    return jnp.sum(jnp.where(jnp.asarray(mask) != 0, x, 0.0), axis=axis)


def masked_mean(
    x: Float[Array, "..."], mask: Shaped[Array, "..."], *, axis: int | None = None
) -> Float[Array, "..."]:
    """Mean of the entries the mask keeps; 0 where it keeps none.

        sum_i x_i / n over mask_i != 0, n = number of kept entries

    Arguments, result and errors as `masked_sum`.
    """
    count = jnp.sum(jnp.asarray(mask) != 0, axis=axis).astype(jnp.float32)
    return masked_sum(x, mask, axis=axis) / jnp.maximum(count, 1.0)


def masked_moments(
    x: Float[Array, "..."], mask: Shaped[Array, "..."]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean and population variance of the entries the mask keeps.

        mean = sum_i x_i / n,   var = sum_i (x_i - mean)^2 / n

    The divisor is n and not n - 1, so one entry has variance 0 instead of 0/0. An empty mask gives
    (0, 0).

    Arguments and errors as `masked_sum`; returns two float32 scalars.
    """
    mean, centred = _centre(x, mask)
    return mean, masked_mean(jnp.square(centred), mask)


def masked_whiten(
    x: Float[Array, "..."],
    mask: Shaped[Array, "..."],
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Float[Array, "..."]:
    """Scale the kept entries to unit variance and, unless told otherwise, to mean 0.

        y_i = (x_i - mean) / sqrt(var + eps)        (+ mean if not shift_mean)

    `mean` and `var` (population variance, divisor n) run over the kept entries of the whole array.
    Under jit on a sharded array that is the global batch; in a `shard_map` it would be the shard
    only, so whiten outside. One kept entry, or all entries equal, gives 0 (`mean` if not
    shift_mean).

    Args:
      x: float32, any shape; usually advantages `[B, R]`.
      mask: same shape; leave out excluded samples here too.
      shift_mean: subtract the mean. False keeps it, as is usual for rewards.
      eps: added to the variance.

    Returns:
      float32 of x's shape; 0 outside the mask.

    Raises:
      TypeError: x is not float32. ValueError: the shapes differ.
    """
    mean, centred = _centre(x, mask)
    variance = masked_mean(jnp.square(centred), mask)
    whitened = centred / jnp.sqrt(variance + eps)
    if not shift_mean:
        whitened = whitened + mean
    return jnp.where(jnp.asarray(mask) != 0, whitened, 0.0)


def _centre(
    x: Float[Array, "..."], mask: Shaped[Array, "..."]
) -> tuple[Float[Array, ""], Float[Array, "..."]]:
    """Mean, and x - mean with zeros outside the mask.

    The mean is refined once: the rounding error of one pass over equal large entries would
    otherwise pass for spread, and whitening would blow it up to noise of order 1.
    """
    rough = masked_mean(x, mask)
    keep = jnp.asarray(mask) != 0
    residual = jnp.where(keep, x, rough) - rough
    correction = masked_mean(residual, mask)
    return rough + correction, jnp.where(keep, residual - correction, 0.0)
