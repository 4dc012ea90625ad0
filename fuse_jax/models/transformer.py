"""Decoder-only transformer: Linen blocks stacked over layers, applied as pure functions.

A model is a tree `{'embed': {'embedding': [V, D]}, 'blocks': <each leaf [L, ...]>,
'final_norm': {'scale': [D]}, 'head': ...}`. Layers are stacked on axis 0, so a pipeline stage is a
slice of `blocks`, a sharding is one PartitionSpec a leaf, and one block is compiled however deep
the model is. Caches are arguments and results, never module state.

Axes: B rows, T tokens, L layers, D hidden, H query heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from fuse_jax.models.architecture import Architecture
from fuse_jax.models.attention import Attend, causal_attention, segment_attention
from fuse_jax.models.projection import dense_dot
from fuse_jax.models.rotary import rotate, rotation

Params = dict[str, Any]
Remat = Literal["none", "full", "dots"]
# Up to this many layers the loop over them is unrolled: it saves slicing weights and stacking
# residuals (12 % of an update at 4 layers). Deeper models keep one block in the program.
UNROLLED_LAYERS = 4


class Shards(NamedTuple):
    """What a block that holds one shard of its heads and MLP does at its two borders.

    enter: before the kernels cut by columns (query, key, value, gate, up). leave: after those cut
    by rows (attention_out, down), whose outputs are partial sums.
    """

    enter: Callable[[Array], Array]
    leave: Callable[[Array], Array]


class RMSNorm(nn.Module):
    """x / rms(x) · scale, in float32 (arXiv 1910.07467)."""

    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normed * scale).astype(self.dtype)


class Block(nn.Module):
    """Pre-norm attention with rotary embedding and grouped queries, then a SwiGLU MLP.

    shards: set inside a manual shard_map, with the sizes of one shard in `arch`; everywhere else
    the compiler inserts the sums, and it is None.
    """

    arch: Architecture
    dtype: Any = jnp.float32
    shards: Shards | None = None

    @nn.compact
    def __call__(
        self,
        x: Array,
        turn: tuple[Array, Array],
        attend: Attend,
        carry: Any = None,
        layer: Any = None,
    ) -> tuple[Array, Any, Any]:
        arch, (rows, length, _) = self.arch, x.shape
        # Residual outputs start smaller, so that the stream keeps its scale at any depth.
        into_residual = nn.initializers.variance_scaling(
            1 / (2 * arch.num_layers), "fan_in", "truncated_normal"
        )
        dense = functools.partial(
            nn.Dense, dtype=self.dtype, param_dtype=jnp.float32, dot_general=dense_dot
        )
        norm = functools.partial(RMSNorm, arch.norm_eps, self.dtype)

        def enter(x: Array) -> Array:
            return x if self.shards is None else self.shards.enter(x)

        def leave(x: Array) -> Array:
            return x if self.shards is None else self.shards.leave(x)

        h = enter(norm(name="attention_norm")(x))

        def heads(name: str, count: int) -> Array:
            projected = dense(count * arch.head_dim, use_bias=arch.attention_bias, name=name)(h)
            return projected.reshape(rows, length, count, arch.head_dim)

        q = rotate(heads("query", arch.num_heads), *turn)
        k = rotate(heads("key", arch.num_kv_heads), *turn)
        v = heads("value", arch.num_kv_heads)
        mixed, carry, emitted = attend(q, k, v, carry, layer)
        mixed = mixed.reshape(rows, length, arch.num_heads * arch.head_dim)
        project = functools.partial(
            dense, arch.hidden_size, use_bias=False, kernel_init=into_residual
        )
        x = x + leave(project(name="attention_out")(mixed))

        h = enter(norm(name="mlp_norm")(x))
        widen = functools.partial(dense, arch.intermediate_size, use_bias=False)
        x = x + leave(project(name="down")(nn.silu(widen(name="gate")(h)) * widen(name="up")(h)))
        return x, carry, emitted


def init(arch: Architecture, key: Array, *, head: Literal["lm", "scalar"] = "lm") -> Params:
    """Random float32 parameters. The scalar head starts at zero: values and scores begin at 0.

    Always traced under jit: the eager initialiser of jax 0.10 gives other numbers.
    """
    return jax.jit(_init, static_argnames=("arch", "head"))(arch, key, head=head)


def _init(arch: Architecture, key: Array, *, head: str) -> Params:
    embed_key, blocks_key, head_key = jax.random.split(key, 3)
    block = Block(arch)
    x = jnp.zeros((1, 1, arch.hidden_size), jnp.float32)
    turn = rotation(arch, jnp.zeros((1, 1), jnp.int32))

    def one(layer_key: Array) -> Any:
        return block.init(layer_key, x, turn, causal_attention)["params"]

    scale = arch.hidden_size**-0.5
    shape = (arch.vocab_size, arch.hidden_size)
    params: Params = {
        "embed": {"embedding": scale * jax.random.normal(embed_key, shape)},
        "blocks": jax.vmap(one)(jax.random.split(blocks_key, arch.num_layers)),
        "final_norm": {"scale": jnp.ones((arch.hidden_size,), jnp.float32)},
    }
    if head == "scalar":
        params["head"] = scalar_head(arch)
    elif not arch.tie_embeddings:
        params["head"] = {"kernel": scale * jax.random.normal(head_key, shape[::-1])}
    return params


def scalar_head(arch: Architecture) -> Params:
    """A head that gives 0 for every state: float32 `kernel` `[D, 1]`, `bias` `[1]`."""
    return {
        "kernel": jnp.zeros((arch.hidden_size, 1), jnp.float32),
        "bias": jnp.zeros((1,), jnp.float32),
    }


def embed(params: Params, tokens: Array, *, dtype: Any = jnp.float32) -> Array:
    """Token embeddings `[B, T, D]` of ids `[B, T]`.

    Gathered, then cast: the gradient of a frequent token is a sum over its places, and in bfloat16
    such a sum stands still after some hundred terms.
    """
    return params["embed"]["embedding"][tokens].astype(dtype)


def apply_blocks(
    arch: Architecture,
    blocks: Params,
    x: Array,
    positions: Array,
    attend: Attend,
    carry: Any = None,
    *,
    dtype: Any = jnp.float32,
    remat: Remat = "none",
    shards: Shards | None = None,
) -> tuple[Array, Any, Any]:
    """Run `x` `[B, T, D]` through stacked blocks (all of them, or any slice along axis 0).

    Returns the hidden states, the carry of `attend` after the last layer, and what `attend` emitted
    stacked over layers. `shards`: see `Block`.
    """
    turn = rotation(arch, positions)
    block = Block(arch, dtype, shards)

    def body(state: tuple[Array, Any], scanned: tuple[Params, Array]) -> tuple[Any, Any]:
        (x, carry), (weights, layer) = state, scanned
        out: Any = block.apply({"params": weights}, x, turn, attend, carry, layer)
        x, carry, emitted = out
        return (x, carry), emitted

    count = jax.tree.leaves(blocks)[0].shape[0]
    (x, carry), emitted = jax.lax.scan(
        rematerialised(body, remat),
        (x, carry),
        (blocks, jnp.arange(count)),
        unroll=count if remat == "none" and count <= UNROLLED_LAYERS else 1,
    )
    return x, carry, emitted


def rematerialised(body: Callable, remat: Remat) -> Callable:
    """`body` with activations kept (`none`), recomputed (`full`), or only dots kept (`dots`)."""
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    policy = policies.nothing_saveable if remat == "full" else policies.dots_saveable
    # prevent_cse is only needed outside scan; inside it would block fusion for nothing.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


def final_norm(arch: Architecture, params: Params, x: Array, *, dtype: Any = jnp.float32) -> Array:
    """The norm after the last block."""
    return RMSNorm(arch.norm_eps, dtype).apply({"params": params["final_norm"]}, x)  # type: ignore[return-value]


def forward(
    arch: Architecture,
    params: Params,
    tokens: Array,
    *,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    dtype: Any = jnp.float32,
    remat: Remat = "none",
    rows: Any = None,
) -> Array:
    """Hidden states after the final norm, `[B, T, D]`, of right-padded or packed `tokens` `[B, T]`.

    Packed rows give `segment_ids` `[B, T]` and `positions` `[B, T]` that restart in each segment.
    `rows`: sharding of the activations' rows. Without it XLA may keep the layout that the embedding
    table's shards suggest, and repeat every row on every device.
    """
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = causal_attention if segment_ids is None else segment_attention(segment_ids)
    x = embed(params, tokens, dtype=dtype)
    if rows is not None:
        x = jax.lax.with_sharding_constraint(x, rows)
    x, _, _ = apply_blocks(arch, params["blocks"], x, positions, attend, dtype=dtype, remat=remat)
    return final_norm(arch, params, x, dtype=dtype)
