"""From hidden states to what RLHF needs: log-probabilities of given tokens, and scalars.

The vocabulary-sized logits exist for one chunk of positions at a time, `[B, chunk, V]`, also in the
backward pass (they are recomputed), never for a whole sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from fuse_jax.models.transformer import Params


class TokenStatistics(NamedTuple):
    """Of each target token, float32 `[B, R]`: its log-probability, and the entropy there (nats)."""

    log_probs: Array
    entropy: Array


def lm_logits(
    params: Params, hidden: Array, *, temperature: float = 1.0, valid_vocab: int | None = None
) -> Array:
    """Float32 logits `[..., V]` over `temperature`; ids from `valid_vocab` on get -inf."""
    if "head" in params:
        kernel = params["head"]["kernel"]
    else:
        kernel = params["embed"]["embedding"].T
    logits = jnp.dot(
        hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32
    ).astype(jnp.float32)
    if temperature != 1.0:
        logits = logits / temperature
    if valid_vocab is not None and valid_vocab < logits.shape[-1]:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < valid_vocab, logits, -jnp.inf)
    return logits


def log_softmax_statistics(logits: Array, targets: Array) -> TokenStatistics:
    """Log-probability of `targets` `[...]` and entropy under `logits` `[..., V]` (-inf allowed)."""
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - peak
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    log_total = jnp.log(total)
    chosen = jnp.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    # An impossible id has weight 0 and contributes nothing, not 0 · inf.
    finite = jnp.where(jnp.isfinite(shifted), shifted, 0.0)
    mean = jnp.sum(weights * finite, axis=-1) / total
    return TokenStatistics(chosen - log_total, log_total - mean)


def token_statistics(
    params: Params,
    hidden: Float[Array, "B R D"],
    targets: Int[Array, "B R"],
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    chunk: int = 0,
) -> TokenStatistics:
    """Log-probabilities of `targets` and entropies, at most `chunk` positions at a time (0 = all).

    `log_probs[b, t] = log softmax(logits(hidden[b, t]) / temperature)[targets[b, t]]`.
    """
    if hidden.shape[:2] != targets.shape:
        raise ValueError(
            f"hidden {hidden.shape} and targets {targets.shape} must agree in rows and positions: "
            "a gather would clamp silently"
        )

    def one(hidden_chunk: Array, target_chunk: Array) -> TokenStatistics:
        logits = lm_logits(params, hidden_chunk, temperature=temperature, valid_vocab=valid_vocab)
        return log_softmax_statistics(logits, target_chunk)

    length = targets.shape[1]
    if chunk <= 0 or length <= chunk:
        return one(hidden, targets)
    return map_chunks(one, chunk, hidden, targets)


def map_chunks(function: Any, chunk: int, *arrays: Array) -> Any:
    """`function` of chunks along axis 1, results (pytree of `[B, chunk]`) joined to `[B, R]`.

    The chunk's interior is recomputed in the backward pass. Rows (axis 0) stay whole, so a sharding
    over rows survives.
    """
    length = arrays[0].shape[1]
    count = -(-length // chunk)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        moved = jnp.moveaxis(x, 0, 1)
        return moved.reshape(moved.shape[0], count * chunk, *moved.shape[3:])[:, :length]

    body = jax.checkpoint(lambda pieces: function(*pieces), prevent_cse=False)
    return jax.tree.map(join, jax.lax.map(body, tuple(split(x) for x in arrays)))


def scalars(params: Params, hidden: Array) -> Array:
    """The scalar head, float32 `[...]`, of hidden states `[..., D]`."""
    head = params["head"]
    weights = head["kernel"].astype(jnp.float32)[:, 0]
    # Not a product of matrices: with one column XLA's CPU code sums the last few rows in another
    # order, and the bits of a sample would depend on its row in the batch.
    return (hidden.astype(jnp.float32) * weights).sum(-1) + head["bias"][0]


def before_response(
    hidden: Float[Array, "B T D"], prompt_lengths: Int[Array, " B"], length: int
) -> Float[Array, "B R D"]:
    """States from which the `length` response tokens are predicted: positions prompt_length-1+t.

    Positions beyond the row read its last one; the caller's mask drops them.
    """
    index = prompt_lengths[:, None] - 1 + jnp.arange(length)
    index = jnp.clip(index, 0, hidden.shape[1] - 1)
    return jnp.take_along_axis(hidden, index[..., None], axis=1)


def response_tokens(
    tokens: Int[Array, "B T"], prompt_lengths: Int[Array, " B"], length: int
) -> Int[Array, "B R"]:
    """Response tokens aligned at column 0; beyond the row the last token repeats (masked)."""
    index = jnp.clip(prompt_lengths[:, None] + jnp.arange(length), 0, tokens.shape[1] - 1)
    return jnp.take_along_axis(tokens, index, axis=1)


def at_last_token(hidden: Float[Array, "B T D"], lengths: Int[Array, " B"]) -> Float[Array, "B D"]:
    """The state at the last real token (position `lengths - 1`), where a reward model reads."""
    index = jnp.clip(lengths - 1, 0, hidden.shape[1] - 1)
    return jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0]
