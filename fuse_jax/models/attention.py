"""Causal attention over whole sequences: jax.nn's on accelerators, our own on the CPU.

The CPU version is written so that XLA's compiler does little besides the dots. Three things differ
from the generic one: heads go before tokens once, so that every dot is a plain
batch of matrices; the division by the softmax's sum happens on the output `[T, D]`, not on the
weights `[T, S]`; and the backward pass gets `sum_s P dP` as `sum_d dO O` (FlashAttention, arXiv
2205.14135, appendix B), a reduction over D instead of S.

Axes: B rows, T tokens, H query heads, K key/value heads, G = H / K, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

# attend(q [B, T, H, head_dim], k, v [B, T, K, head_dim], carry, layer)
#   -> (out [B, T, H, head_dim], carry, emitted): the carry runs through the layers (a cache that is
# updated in place), what is emitted is stacked over them (keys and values of a prefill).
Attend = Callable[[Array, Array, Array, Any, Array], tuple[Array, Any, Any]]

MASKED = -1e30  # exp(MASKED - row maximum) is exactly 0
BATCH = ((0, 1), (0, 1))


def causal_attention(
    q: Array, k: Array, v: Array, carry: Any, layer: Any
) -> tuple[Array, Any, Any]:
    """Attention over the whole sequence, softmax in float32.

    Sequences are padded on the right, so causality alone keeps padding out of every real token.
    """
    del layer
    if jax.default_backend() == "cpu":
        return causal_attention_cpu(q, k, v, causal_mask(q.shape[1])), carry, None
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), carry, None


def segment_attention(segment_ids: Array) -> Attend:
    """Causal attention inside the segments of packed rows; `segment_ids` `[B, T]`, 0 = padding."""
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]

    def attend(q: Array, k: Array, v: Array, carry: Any, layer: Any) -> tuple[Array, Any, Any]:
        del layer
        if jax.default_backend() == "cpu":
            mask = causal_mask(q.shape[1]) & same
            return causal_attention_cpu(q, k, v, mask), carry, None
        return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True), carry, None

    return attend


@jax.custom_vjp
def causal_attention_cpu(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """`[B, T, H, D]` from q `[B, T, H, D]`, k and v `[B, T, K, D]`; softmax in float32.

    mask: bool `[B or 1, 1, T, T]`, True = attends; every row must attend to something.
    """
    return _forward(q, k, v, mask)[0]


def _heads_first(x: Array, kv_heads: int) -> Array:
    """`[B, T, H, D]` to `[B, K, G·T, D]`: the query heads of a key/value head under one another."""
    rows, length, heads, size = x.shape
    grouped = x.reshape(rows, length, kv_heads, heads // kv_heads, size)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, size)


def _tokens_first(x: Array, length: int) -> Array:
    """The inverse of `_heads_first`."""
    rows, kv_heads, folded, size = x.shape
    grouped = x.reshape(rows, kv_heads, folded // length, length, size)
    return grouped.transpose(0, 3, 1, 2, 4).reshape(rows, length, -1, size)


def _dot(a: Array, b: Array, over_a: int, over_b: int) -> Array:
    return lax.dot_general(
        a, b, (((over_a,), (over_b,)), BATCH), preferred_element_type=jnp.float32
    )


def _forward(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, tuple]:
    length, kv_heads = k.shape[1], k.shape[2]
    groups = q.shape[2] // kv_heads
    qh, kh, vh = (_heads_first(x, kv_heads) for x in (q, k, v))
    scores = _dot(qh, kh, 3, 3) * (q.shape[-1] ** -0.5)
    scores = jnp.where(jnp.tile(mask, (1, 1, groups, 1)), scores, MASKED)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.astype(v.dtype)
    out = (_dot(weights, vh, 3, 2) / total).astype(q.dtype)
    return _tokens_first(out, length), (qh, kh, vh, weights, total, out)


def _backward(saved: tuple, g: Array) -> tuple[Array, Array, Array, None]:
    qh, kh, vh, weights, total, out = saved
    length = g.shape[1]
    by_out = _heads_first(g, kh.shape[1])
    inner = jnp.sum((by_out * out).astype(jnp.float32), axis=-1, keepdims=True)
    scaled = (by_out / total).astype(by_out.dtype)
    by_value = _dot(weights, scaled, 2, 2)
    by_weight = _dot(scaled, vh, 3, 3) - inner / total
    by_score = (weights * by_weight * (qh.shape[-1] ** -0.5)).astype(qh.dtype)
    by_query, by_key = _dot(by_score, kh, 3, 2), _dot(by_score, qh, 2, 2)

    def cast(x: Array) -> Array:
        return _tokens_first(x.astype(qh.dtype), length)

    return cast(by_query), cast(by_key), cast(by_value), None


causal_attention_cpu.defvjp(_forward, _backward)


def causal_mask(length: int) -> Array:
    """Each token attends to itself and those before it, bool `[1, 1, T, T]`."""
    return jnp.tril(jnp.ones((length, length), bool))[None, None]
