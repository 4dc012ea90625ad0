"""The programs behind the engine's verbs: jitted, pure, one executable a shape.

Every function takes the engine (static) and returns its arrays in the engine's shardings, so that
no call is compiled twice.

Axes: L layers, N cache blocks, K key/value heads, C steps of a chunk.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from fuse_jax.models.heads import lm_logits
from fuse_jax.models.transformer import Params, apply_blocks, causal_attention, embed, final_norm
from fuse_jax.placement.mesh import ROW_AXES
from fuse_jax.rollout.cache_attention import append, block_count, over_cache, to_blocks
from fuse_jax.rollout.sampling import Draw, sample, sample_keys

if TYPE_CHECKING:
    from fuse_jax.rollout.engine import Engine

HostArray = Array | np.ndarray  # what the host hands in; it is copied to the devices


class Rows(NamedTuple):
    """Sequences being generated: all slots of an engine, or some rows on their way into slots.

    A row's cache holds its first `lengths` tokens; `last_tokens` (not in the cache yet) is the
    newest of its `generated` response tokens. A row that is `done`, or never held anything, is
    masked.
    """

    keys: Float[Array, "L N rows K block head_dim"]
    values: Float[Array, "L N rows K block head_dim"]
    last_tokens: Int[Array, " rows"]
    lengths: Int[Array, " rows"]
    generated: Int[Array, " rows"]
    max_new: Int[Array, " rows"]
    sample_ids: Int[Array, " rows"]
    done: Bool[Array, " rows"]


DecodeState = Rows


class Chunk(NamedTuple):
    """What one `generate` drew. Slot b drew the first `counts[b]` of its column, in order.

    `gaps` is None unless the engine was built with `gaps=True`. `steps` of the chunk were run: it
    ends early when every slot is done.
    """

    tokens: Int[Array, "C slots"]
    log_probs: Float[Array, "C slots"]
    gaps: Array | None
    counts: Int[Array, " slots"]
    done: Bool[Array, " slots"]
    steps: Int[Array, ""]


def _placed(engine: Engine, rows: Rows) -> Rows:
    """`rows` where they belong: every function returns the same shardings, so none recompiles."""
    return jax.tree.map(jax.lax.with_sharding_constraint, rows, engine.row_shardings())


def _placed_rows(engine: Engine, *arrays: HostArray) -> tuple[Array, ...]:
    row = NamedSharding(engine.mesh, P(ROW_AXES))
    return tuple(jax.lax.with_sharding_constraint(x, row) for x in arrays)


def _replicated(engine: Engine, tree: Any) -> Any:
    whole = NamedSharding(engine.mesh, P())
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), tree)


@functools.partial(jax.jit, static_argnums=0)
def init_decode_state(engine: Engine) -> DecodeState:
    return _placed(engine, _empty(engine, engine.rollout.slots, engine.cache_blocks))


def _empty(engine: Engine, rows: int, blocks: int) -> Rows:
    arch = engine.arch
    shape = (arch.num_layers, blocks, rows, arch.num_kv_heads, engine.rollout.cache_block)
    cache = jnp.zeros((*shape, arch.head_dim), engine.dtype)
    zeros = jnp.zeros((rows,), jnp.int32)
    return Rows(cache, cache, zeros, zeros, zeros, zeros, zeros - 1, zeros == 0)


@functools.partial(jax.jit, static_argnums=0)
def prefill(
    engine: Engine,
    params: Params,
    tokens: HostArray,
    lengths: HostArray,
    sample_ids: HostArray,
    max_new: HostArray,
    generated: HostArray,
    seed_key: Any,
) -> tuple[Rows, Draw]:
    arch, dtype = engine.arch, jnp.dtype(engine.dtype)
    tokens, lengths, sample_ids, max_new, generated = _placed_rows(
        engine, tokens, lengths, sample_ids, max_new, generated
    )

    def attend(q: Array, k: Array, v: Array, carry: Any, layer: Array):
        mixed, carry, _ = causal_attention(q, k, v, carry, layer)
        return mixed, carry, (k, v)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = embed(params, tokens, dtype=dtype)
    x, _, (keys, values) = apply_blocks(arch, params["blocks"], x, positions, attend, dtype=dtype)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    draw = _draw(engine, params, last, sample_ids, generated, seed_key)
    generated = generated + 1
    done = _finished(engine, draw.tokens, generated, max_new)
    block = engine.rollout.cache_block
    rows = Rows(
        to_blocks(keys, block),
        to_blocks(values, block),
        draw.tokens,
        lengths,
        generated,
        max_new,
        sample_ids,
        done,
    )
    return _placed(engine, rows), _replicated(engine, draw)


def _draw(
    engine: Engine, params: Params, x: Array, sample_ids: Array, positions: Array, seed_key: Any
) -> Draw:
    """Tokens at response `positions` `[B]` from the states `x` `[B, D]` after the last block."""
    hidden = final_norm(engine.arch, params, x, dtype=jnp.dtype(engine.dtype))
    keys = sample_keys(seed_key, sample_ids, positions)
    return sample(lm_logits(params, hidden), keys, engine.sampling, gaps=engine.gaps)


def _finished(engine: Engine, tokens: Array, generated: Array, max_new: Array) -> Array:
    stopped = jnp.isin(tokens, jnp.array(engine.stop_tokens, jnp.int32))
    return stopped | (generated >= max_new)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def insert(engine: Engine, state: DecodeState, rows: Rows, slots: HostArray) -> DecodeState:
    def cache(all_slots: Array, new: Array) -> Array:
        # The whole slot is overwritten: what its last guest left (NaN, even) is gone.
        missing = all_slots.shape[1] - new.shape[1]
        new = jnp.pad(new, [(0, 0), (0, missing)] + [(0, 0)] * 4)
        return all_slots.at[:, :, slots].set(new, mode="drop")

    def vector(all_slots: Array, new: Array) -> Array:
        return all_slots.at[slots].set(new, mode="drop")

    caches = (cache(state.keys, rows.keys), cache(state.values, rows.values))
    return _placed(engine, Rows(*caches, *map(vector, state[2:], rows[2:])))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def generate(
    engine: Engine, params: Params, state: DecodeState, seed_key: Any
) -> tuple[DecodeState, Chunk]:
    slots, steps = engine.rollout.slots, engine.rollout.chunk
    nothing = jnp.zeros((steps, slots), jnp.float32)
    drawn = Draw(nothing.astype(jnp.int32), nothing, nothing if engine.gaps else None)

    def going(loop: tuple[Array, DecodeState, Draw]) -> Array:
        step, state, _ = loop
        return (step < steps) & ~jnp.all(state.done)

    def one(loop: tuple[Array, DecodeState, Draw]) -> tuple[Array, DecodeState, Draw]:
        step, state, drawn = loop
        state, draw = _decode_step(engine, params, state, seed_key)
        drawn = jax.tree.map(
            lambda kept, new: jax.lax.dynamic_update_index_in_dim(kept, new, step, 0), drawn, draw
        )
        return step + 1, state, drawn

    before = state.generated
    step, state, drawn = jax.lax.while_loop(going, one, (jnp.int32(0), state, drawn))
    counts = state.generated - before
    chunk = Chunk(drawn.tokens, drawn.log_probs, drawn.gaps, counts, state.done, step)
    return _placed(engine, state), _replicated(engine, chunk)


def _decode_step(
    engine: Engine, params: Params, state: DecodeState, seed_key: Any
) -> tuple[DecodeState, Draw]:
    """Feed every live slot its last token, cache it, and draw the next."""
    arch, dtype, live = engine.arch, jnp.dtype(engine.dtype), ~state.done
    blocks = block_count(state.lengths, live, engine.rollout.cache_block)
    attend = over_cache(state.keys, state.values, state.lengths, blocks)
    x = embed(params, state.last_tokens[:, None], dtype=dtype)
    x, _, (keys, values) = apply_blocks(
        arch, params["blocks"], x, state.lengths[:, None], attend, dtype=dtype
    )
    draw = _draw(engine, params, x[:, 0], state.sample_ids, state.generated, seed_key)
    generated = state.generated + live
    # Always true, but only known once a token is drawn. Without it the last layer's key could be
    # written before its attention has read the cache, and XLA would copy the cache each step.
    written = live & (draw.tokens >= 0)
    return (
        Rows(
            append(state.keys, keys, state.lengths, written),
            append(state.values, values, state.lengths, written),
            jnp.where(live, draw.tokens, state.last_tokens),
            state.lengths + live,
            generated,
            state.max_new,
            state.sample_ids,
            state.done | _finished(engine, draw.tokens, generated, state.max_new),
        ),
        draw,
    )


@functools.partial(jax.jit, static_argnums=0)
def extract(engine: Engine, state: DecodeState, slots: HostArray) -> Rows:
    inside = slots < engine.rollout.slots
    index = jnp.where(inside, slots, 0)
    rows = Rows(state.keys[:, :, index], state.values[:, :, index], *(x[index] for x in state[2:]))
    return _placed(engine, rows._replace(done=rows.done | ~inside))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def release(engine: Engine, state: DecodeState, slots: HostArray) -> DecodeState:
    return _placed(engine, state._replace(done=state.done.at[slots].set(True, mode="drop")))
