"""The slot engine: JetStream's verbs as pure functions over a fixed number of slots.

    state = engine.init_decode_state()
    rows, draw = engine.prefill(params, tokens, lengths, ids, max_new, seed_key)
    state = engine.insert(state, rows, slots)
    state, chunk = engine.generate(params, state, seed_key)

`prefill` reads prompts and draws the FIRST response token of each; `generate` draws the following
ones, `chunk` steps in one dispatch. A slot that has drawn a stop token or its last allowed token is
done: it is masked, writes nothing, and waits to be refilled. `extract` takes live slots out and
`insert` puts them into any slot of any engine of the same geometry, where they go on bit-equal.

No shape depends on what is in the slots, so a row's bits depend on nothing but the row.

Axes: L layers, N cache blocks, K key/value heads, C steps of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from fuse_jax.buckets import automatic_lengths
from fuse_jax.config import RolloutConfig
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.heads import lm_logits
from fuse_jax.models.transformer import (
    Params,
    apply_blocks,
    causal_attention,
    embed,
    final_norm,
    init,
)
from fuse_jax.placement.mesh import ROW_AXES, row_shards, single_device_mesh
from fuse_jax.placement.sharding import kv_heads_axis, parameter_specs
from fuse_jax.rollout.cache_attention import append, block_count, over_cache, to_blocks
from fuse_jax.rollout.sampling import Draw, Sampling, check_key, sample, sample_keys


class Rows(NamedTuple):
    """Sequences being generated: all slots of an engine, or some rows on their way into slots.

    A row's cache holds its first `lengths` tokens; `last_tokens` (not in the cache yet) is the
    newest of its `generated` response tokens. A row that is `done`, or never held anything, is
    masked.
    """

    keys: Float[Array, "L N rows K block head_dim"]
    values: Float[Array, "L N rows K block head_dim"]
    last_tokens: Int[Array, "rows"]
    lengths: Int[Array, "rows"]
    generated: Int[Array, "rows"]
    max_new: Int[Array, "rows"]
    sample_ids: Int[Array, "rows"]
    done: Bool[Array, "rows"]


DecodeState = Rows


class Chunk(NamedTuple):
    """What one `generate` drew. Slot b drew the first `counts[b]` of its column, in order.

    `gaps` is None unless the engine was built with `gaps=True`. `steps` of the chunk were run: it
    ends early when every slot is done.
    """

    tokens: Int[Array, "C slots"]
    log_probs: Float[Array, "C slots"]
    gaps: Array | None
    counts: Int[Array, "slots"]
    done: Bool[Array, "slots"]
    steps: Int[Array, ""]


class Shape(NamedTuple):
    """One program that an engine compiles."""

    function: str
    rows: int
    length: int  # tokens of a prompt bucket, cache positions of rows, or steps of a chunk


@dataclass(frozen=True)
class Engine:
    """Settings of the engine, hashable; every method is a pure function of its arguments.

    Args:
      rollout: geometry (slots, lengths, chunk, prefill_rows, cache_block) and distribution.
      stop_tokens: ids that end a response; the one drawn is part of it.
      valid_vocab: ids below it are real; the others are never drawn.
      dtype: of weights, activations and cache; log-probs are float32 always.
      gaps: also return how close each draw was (see `Draw`).
      mesh: slots are cut over (data, fsdp), key/value heads over tensor where it divides them.
    """

    arch: Architecture
    rollout: RolloutConfig
    stop_tokens: tuple[int, ...]
    valid_vocab: int
    dtype: str = "float32"
    gaps: bool = False
    mesh: Mesh = field(default_factory=single_device_mesh)

    def __post_init__(self) -> None:
        rollout, shards = self.rollout, row_shards(self.mesh)
        if self.valid_vocab > self.arch.vocab_size:
            raise ValueError(
                f"valid_vocab={self.valid_vocab} exceeds the model's {self.arch.vocab_size} rows"
            )
        if rollout.max_prompt_length < 1 or rollout.max_new_tokens < 1 or rollout.chunk < 1:
            raise ValueError(
                f"rollout.max_prompt_length={rollout.max_prompt_length}, rollout.max_new_tokens="
                f"{rollout.max_new_tokens} and rollout.chunk={rollout.chunk} must be at least 1"
            )
        for name in ("slots", "prefill_rows"):
            count = getattr(rollout, name)
            if count < 1 or count % shards:
                raise ValueError(
                    f"rollout.{name}={count} must be a positive multiple of the {shards} shards "
                    "that mesh.data and mesh.fsdp cut rows into"
                )
        if self.prompt_buckets[-1] < rollout.max_prompt_length:
            raise ValueError(
                f"rollout.prompt_buckets={rollout.prompt_buckets} end below "
                f"rollout.max_prompt_length={rollout.max_prompt_length}: add it"
            )
        self.sampling  # noqa: B018  refuses a temperature or top_p that cannot be

    # ------------------------------------------------------------------ geometry

    @functools.cached_property
    def sampling(self) -> Sampling:
        """The distribution tokens are drawn from."""
        rollout = self.rollout
        return Sampling(self.valid_vocab, rollout.temperature, rollout.top_k, rollout.top_p)

    @functools.cached_property
    def prompt_buckets(self) -> tuple[int, ...]:
        """Prompt lengths that prefill compiles for, ascending."""
        rollout = self.rollout
        given = rollout.prompt_buckets or automatic_lengths(rollout.max_prompt_length)
        return tuple(sorted(set(given)))

    @property
    def cache_blocks(self) -> int:
        """Blocks of a slot: they hold the longest bucket, and the longest prompt with response."""
        rollout = self.rollout
        longest = max(rollout.max_prompt_length + rollout.max_new_tokens, self.prompt_buckets[-1])
        return -(-longest // rollout.cache_block)

    def bucket_of(self, length: int) -> int:
        """The prompt bucket of a prompt of `length` tokens, from its own length alone."""
        if not 1 <= length <= self.rollout.max_prompt_length:
            raise ValueError(
                f"a prompt of {length} tokens does not fit rollout.max_prompt_length="
                f"{self.rollout.max_prompt_length} (at least 1): filter it, or raise the key"
            )
        return next(bucket for bucket in self.prompt_buckets if length <= bucket)

    def shapes(self, *, migration: bool = False) -> Iterator[Shape]:
        """Every program that generation with this engine compiles.

        `migration` adds those that move live slots.
        """
        rollout, block = self.rollout, self.rollout.cache_block
        positions = self.cache_blocks * block
        yield Shape("init_decode_state", rollout.slots, positions)
        for bucket in self.prompt_buckets:
            yield Shape("prefill", rollout.prefill_rows, bucket)
        inserted = {-(-bucket // block) * block for bucket in self.prompt_buckets}
        for length in sorted(inserted | ({positions} if migration else set())):
            yield Shape("insert", rollout.prefill_rows, length)
        yield Shape("generate", rollout.slots, rollout.chunk)
        if migration:
            yield Shape("extract", rollout.prefill_rows, positions)
            yield Shape("release", rollout.prefill_rows, positions)

    # ------------------------------------------------------------------ verbs

    def init_decode_state(self) -> DecodeState:
        """All slots empty (done)."""
        return _init_decode_state(self)

    def prefill(
        self,
        params: Params,
        tokens: Int[Array, "rows T"],
        lengths: Int[Array, "rows"],
        sample_ids: Int[Array, "rows"],
        max_new: Int[Array, "rows"],
        seed_key: Any,
    ) -> tuple[Rows, Draw]:
        """Read prompts (right-padded to a bucket) and draw the first token of each response.

        There are always `rollout.prefill_rows` rows. A padding row has sample id -1, length 1 and
        max_new 0; it comes out done, and must go into no slot.
        """
        self._check_rows(tokens.shape[0], "prefill")
        if tokens.shape[1] not in self.prompt_buckets:
            raise ValueError(
                f"prompts padded to {tokens.shape[1]} match no bucket of {self.prompt_buckets}"
            )
        check_key(seed_key)
        return _prefill(self, params, tokens, lengths, sample_ids, max_new, seed_key)

    def insert(self, state: DecodeState, rows: Rows, slots: Int[Array, "rows"]) -> DecodeState:
        """Put row i into slot `slots[i]`, whatever it held; an index >= the slot count drops it.

        `state` is donated. `rows` come from `prefill`, or from `extract` of an engine of the same
        geometry.
        """
        if rows.keys.shape[2] != slots.shape[0] or rows.keys.shape[1] > self.cache_blocks:
            raise ValueError(
                f"rows of shape {rows.keys.shape} do not go into {slots.shape[0]} slots of "
                f"{self.cache_blocks} cache blocks: the engines' geometries differ"
            )
        return _insert(self, state, rows, slots)

    def generate(
        self, params: Params, state: DecodeState, seed_key: Any
    ) -> tuple[DecodeState, Chunk]:
        """Up to `rollout.chunk` steps of all live slots in one dispatch. `state` is donated."""
        check_key(seed_key)
        return _generate(self, params, state, seed_key)

    def extract(self, state: DecodeState, slots: Int[Array, "rows"]) -> Rows:
        """A copy of the rows in `slots`; an index >= the slot count gives a row that is done."""
        return _extract(self, state, slots)

    def release(self, state: DecodeState, slots: Int[Array, "rows"]) -> DecodeState:
        """Mark `slots` done, as after `extract`; indices >= the slot count do nothing.

        `state` is donated.
        """
        return _release(self, state, slots)

    def place_params(self, params: Params) -> Params:
        """`params` in the sharding of this engine's mesh (no copy if they have it already).

        A program is compiled anew for another sharding, and for arrays bound to no device: placing
        them first keeps the set of programs finite wherever weights come from.
        """
        return jax.device_put(params, self._param_shardings)

    @functools.cached_property
    def _param_shardings(self) -> Any:
        shapes = jax.eval_shape(functools.partial(init, self.arch), jax.random.key(0))
        return parameter_specs(self.arch, shapes, self.mesh)

    def place(self, rows: Rows) -> Rows:
        """`rows` moved to this engine's devices (no copy if they are there already)."""
        return jax.device_put(rows, self.row_shardings())

    def row_shardings(self) -> Rows:
        """Rows over (data, fsdp), key/value heads over tensor where it divides them."""
        heads = kv_heads_axis(self.arch, self.mesh)
        cache = NamedSharding(self.mesh, P(None, None, ROW_AXES, heads))
        row = NamedSharding(self.mesh, P(ROW_AXES))
        return Rows(cache, cache, *[row] * (len(Rows._fields) - 2))  # type: ignore[arg-type]

    def _check_rows(self, rows: int, function: str) -> None:
        if rows != self.rollout.prefill_rows:
            raise ValueError(
                f"{function} takes rollout.prefill_rows={self.rollout.prefill_rows} rows, not "
                f"{rows}: pad them, so that shapes stay the same"
            )


# ---------------------------------------------------------------------- shardings


def _placed(engine: Engine, rows: Rows) -> Rows:
    """`rows` where they belong: every function returns the same shardings, so none recompiles."""
    return jax.tree.map(jax.lax.with_sharding_constraint, rows, engine.row_shardings())


def _placed_rows(engine: Engine, *arrays: Array) -> tuple[Array, ...]:
    row = NamedSharding(engine.mesh, P(ROW_AXES))
    return tuple(jax.lax.with_sharding_constraint(x, row) for x in arrays)


def _replicated(engine: Engine, tree: Any) -> Any:
    whole = NamedSharding(engine.mesh, P())
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), tree)


# ---------------------------------------------------------------------- programs


@functools.partial(jax.jit, static_argnums=0)
def _init_decode_state(engine: Engine) -> DecodeState:
    return _placed(engine, _empty(engine, engine.rollout.slots, engine.cache_blocks))


def _empty(engine: Engine, rows: int, blocks: int) -> Rows:
    arch = engine.arch
    shape = (arch.num_layers, blocks, rows, arch.num_kv_heads, engine.rollout.cache_block)
    cache = jnp.zeros((*shape, arch.head_dim), engine.dtype)
    zeros = jnp.zeros((rows,), jnp.int32)
    return Rows(cache, cache, zeros, zeros, zeros, zeros, zeros - 1, zeros == 0)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(
    engine: Engine,
    params: Params,
    tokens: Array,
    lengths: Array,
    sample_ids: Array,
    max_new: Array,
    seed_key: Any,
) -> tuple[Rows, Draw]:
    arch, dtype = engine.arch, jnp.dtype(engine.dtype)
    tokens, lengths, sample_ids, max_new = _placed_rows(
        engine, tokens, lengths, sample_ids, max_new
    )

    def attend(q: Array, k: Array, v: Array, carry: Any, layer: Array):
        mixed, carry, _ = causal_attention(q, k, v, carry, layer)
        return mixed, carry, (k, v)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = embed(params, tokens, dtype=dtype)
    x, _, (keys, values) = apply_blocks(arch, params["blocks"], x, positions, attend, dtype=dtype)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    generated = jnp.zeros_like(lengths)
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
def _insert(engine: Engine, state: DecodeState, rows: Rows, slots: Array) -> DecodeState:
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
def _generate(
    engine: Engine, params: Params, state: DecodeState, seed_key: Any
) -> tuple[DecodeState, Chunk]:
    slots, steps = engine.rollout.slots, engine.rollout.chunk
    params = _cast(params, engine.dtype)
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
    chunk = Chunk(*drawn, state.generated - before, state.done, step)
    return _placed(engine, state), _replicated(engine, chunk)


def _cast(params: Params, dtype: str) -> Params:
    """Weights in the compute dtype, once a chunk and not once a step; norm scales stay float32."""

    def cast(path: Any, leaf: Array) -> Array:
        return leaf if path[-1].key == "scale" else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


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
    return (
        Rows(
            append(state.keys, keys, state.lengths, live),
            append(state.values, values, state.lengths, live),
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
def _extract(engine: Engine, state: DecodeState, slots: Array) -> Rows:
    inside = slots < engine.rollout.slots
    index = jnp.where(inside, slots, 0)
    rows = Rows(state.keys[:, :, index], state.values[:, :, index], *(x[index] for x in state[2:]))
    return _placed(engine, rows._replace(done=rows.done | ~inside))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _release(engine: Engine, state: DecodeState, slots: Array) -> DecodeState:
    return _placed(engine, state._replace(done=state.done.at[slots].set(True, mode="drop")))
