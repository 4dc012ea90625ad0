"""Weights that make a loss a plain sum: the denominators are settled before a mini-batch is cut.

`loss_weights` is given the mask of the whole mini-batch (or its totals); then any cut into
micro-batches or shards adds up to the same loss and gradient.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fuse_jax.rl.checks import require_float32, require_rows, require_same_shape


def loss_totals(
    response_mask: Shaped[Array, "B R"], sample_valid: Shaped[Array, " B"] | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Number of tokens and of non-empty sequences that count in a loss: the denominators.

    Totals of parts add. Excluded samples and empty responses count in neither.

    Args:
      response_mask: `[B, R]`, nonzero for real tokens.
      sample_valid: `[B]`, nonzero = the sample counts; all do when None.

    Returns:
      (total_tokens, total_sequences), float32 scalars.
    """
    counted = _counted(response_mask, sample_valid)
    tokens = jnp.sum(counted).astype(jnp.float32)
    sequences = jnp.sum(jnp.any(counted, axis=1)).astype(jnp.float32)
    return tokens, sequences


def loss_weights(
    response_mask: Shaped[Array, "B R"],
    mode: Literal["token_mean", "sequence_mean"],
    *,
    sample_valid: Shaped[Array, " B"] | None = None,
    total_tokens: Float[Array, ""] | float | None = None,
    total_sequences: Float[Array, ""] | float | None = None,
) -> Float[Array, "B R"]:
    """Weight of each token in a loss, so that `sum(weights * per_token)` is the wanted mean.

        token_mean:     w = m / total_tokens                       every token counts the same
        sequence_mean:  w = m / (total_sequences * own_tokens)     every sequence counts the same

    Denominators count real tokens of samples that count, never the padded width; a sample with
    `sample_valid` 0 weighs 0 and is in no denominator, as is an empty response. A sample whose
    advantages happen to be all 0 does count. With nothing to count all weights are 0, so loss and
    gradient are 0.

    Source: sequence_mean is the usual sample-level average; token_mean is DAPO's, arXiv 2503.14476,
    section 3.3.

    Args:
      response_mask: `[B, R]`, nonzero for real tokens, of the whole mini-batch; or of a part, and
        then with:
      mode: which mean.
      sample_valid: `[B]`, nonzero = the sample counts; all do when None.
      total_tokens: for token_mean, the denominator of the whole mini-batch when the mask is only a
        part of it (from `loss_totals`, added over the parts).
      total_sequences: the same for sequence_mean. Both may be given; the mode takes its own.

    Returns:
      `[B, R]` float32, 0 outside the mask; sums to 1 over the whole mini-batch unless nothing
      counts.

    Raises:
      ValueError: unknown mode, or only the other mode's total is given.
    """
    totals = {"token_mean": total_tokens, "sequence_mean": total_sequences}
    if mode not in totals:
        raise ValueError(f"mode must be one of token_mean, sequence_mean, got {mode!r}")
    total = totals[mode]
    if total is None:
        if total_tokens is not None or total_sequences is not None:
            needed = "total_tokens" if mode == "token_mean" else "total_sequences"
            raise ValueError(f"mode {mode!r} divides by {needed}: pass it too")
        total = loss_totals(response_mask, sample_valid)[0 if mode == "token_mean" else 1]
    counted = _counted(response_mask, sample_valid)
    denominator = jnp.maximum(jnp.asarray(total, jnp.float32), 1.0)
    if mode == "sequence_mean":
        own = jnp.sum(counted, axis=1, keepdims=True).astype(jnp.float32)
        denominator = denominator * jnp.maximum(own, 1.0)
    return jnp.where(counted, 1.0 / denominator, 0.0)


def _counted(response_mask, sample_valid):
    real = jnp.asarray(response_mask) != 0
    if sample_valid is None:
        return real
    require_rows(real.shape[0], sample_valid=sample_valid)
    return real & (jnp.asarray(sample_valid) != 0)[:, None]


def weighted_sum(x: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[Array, ""]:
    """`sum(weights * x)` over the entries of nonzero weight; the rest may hold anything.

    Clean the inputs that x was computed from as well when it is differentiated.

    Args:
      x: float32, any shape.
      weights: float32, same shape.

    Returns:
      float32 scalar.

    Raises:
      TypeError: not float32. ValueError: shapes differ.
    """
    require_float32(x=x, weights=weights)
    require_same_shape(x=x, weights=weights)
    return jnp.sum(weights * jnp.where(weights != 0, x, 0.0))
