"""Attention of one new token a slot over a cache cut into blocks.

The cache is `[L, N, slots, K, block, head_dim]`: N blocks of positions, each a contiguous slab for
all slots, so that a block is one memory copy away from a batched product. Blocks are read one
after the other with a running maximum and sum (Milakov & Gimelshein, arXiv 1805.02867). How many
follows the longest live slot, at run time: one executable serves every length, and a row's bits do
not depend on the others', because a block beyond a row's own length adds exact zeros.

The new token's own key and value open the sum, so the cache is only read while the layers run;
`append` then writes all layers at once, in place.

Axes: L layers, N blocks, K key/value heads, G query heads a key/value head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from fuse_jax.models.transformer import Attend


def block_count(lengths: Int[Array, " slots"], live: Bool[Array, " slots"], block: int) -> Array:
    """Blocks that hold the cached positions of the longest live slot."""
    return -(-jnp.max(jnp.where(live, lengths, 0)) // block)


def over_cache(
    keys: Float[Array, "L N slots K block head_dim"],
    values: Float[Array, "L N slots K block head_dim"],
    lengths: Int[Array, " slots"],
    blocks: Int[Array, ""],
) -> Attend:
    """`attend` for one token a slot: itself and the first `lengths` cached positions.

    Emits the token's key and value, each `[slots, K, head_dim]`, for `append`.
    """
    block = keys.shape[4]

    def attend(q: Array, k: Array, v: Array, carry: None, layer: Array):
        slots, _, heads, width = q.shape
        k, v = k[:, 0], v[:, 0]
        grouped = q.reshape(slots, k.shape[1], heads // k.shape[1], width) * width**-0.5

        def read(cache: Array, index: Array) -> Array:
            size = (1, 1, *cache.shape[2:])
            return jax.lax.dynamic_slice(cache, (layer, index, 0, 0, 0, 0), size)[0, 0]

        def one_block(index: Array, state: tuple[Array, Array, Array]):
            peak, total, mixed = state
            scores = jnp.einsum(
                "bkgd,bksd->bkgs", grouped, read(keys, index), preferred_element_type=jnp.float32
            )
            cached = index * block + jnp.arange(block) < lengths[:, None]
            scores = jnp.where(cached[:, None, None], scores, -jnp.inf)
            higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - higher[..., None])
            shrink = jnp.exp(peak - higher)
            added = jnp.einsum(
                "bkgs,bksd->bkgd",
                weights.astype(v.dtype),
                read(values, index),
                preferred_element_type=jnp.float32,
            )
            total = total * shrink + jnp.sum(weights, axis=-1)
            return higher, total, mixed * shrink[..., None] + added

        own = jnp.einsum("bkgd,bkd->bkg", grouped, k, preferred_element_type=jnp.float32)
        first = jnp.broadcast_to(v[:, :, None].astype(jnp.float32), grouped.shape)
        state = (own, jnp.ones_like(own), first)
        _, total, mixed = jax.lax.fori_loop(0, blocks, one_block, state)
        out = (mixed / total[..., None]).astype(q.dtype)
        return out.reshape(q.shape), carry, (k, v)

    return attend


def append(
    cache: Float[Array, "L N slots K block head_dim"],
    new: Float[Array, "L slots K head_dim"],
    lengths: Int[Array, " slots"],
    live: Bool[Array, " slots"],
) -> Array:
    """`cache` with `new` at position `lengths[b]` of every live slot b; other slots keep theirs."""
    blocks, slots, block = cache.shape[1], cache.shape[2], cache.shape[4]
    # A slot that is not live writes out of range, which drops the write.
    index = jnp.where(live, lengths // block, blocks)
    target = cache.at[:, index, jnp.arange(slots), :, lengths % block]
    return target.set(jnp.moveaxis(new, 1, 0), mode="drop", unique_indices=True)


def to_blocks(x: Float[Array, "L rows T K head_dim"], block: int) -> Array:
    """Keys or values of whole sequences in the cache's layout, `[L, N, rows, K, block, head_dim]`.

    T is padded with zeros to a multiple of `block`.
    """
    layers, rows, length, heads, width = x.shape
    count = -(-length // block)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, count * block - length), (0, 0), (0, 0)))
    return x.reshape(layers, rows, count, block, heads, width).transpose(0, 2, 1, 4, 3, 5)
