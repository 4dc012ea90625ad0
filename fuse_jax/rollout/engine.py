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
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from fuse_jax.buckets import automatic_lengths
from fuse_jax.config import RolloutConfig
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.compute_copy import compute_copy
from fuse_jax.models.transformer import Params, init
from fuse_jax.placement.mesh import ROW_AXES, row_shards, single_device_mesh
from fuse_jax.placement.sharding import kv_heads_axis, parameter_specs
from fuse_jax.rollout import programs
from fuse_jax.rollout.programs import Chunk, DecodeState, HostArray, Rows
from fuse_jax.rollout.sampling import Draw, Sampling, check_key

__all__ = ["Chunk", "DecodeState", "Engine", "Rows", "Shape"]


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

    @functools.cached_property
    def resume_buckets(self) -> tuple[int, ...]:
        """Prompt buckets, and longer ones for a prompt with some of its response, ascending."""
        rollout, prompts = self.rollout, self.prompt_buckets
        longest = self.cache_blocks * rollout.cache_block
        more = automatic_lengths(rollout.max_prompt_length + rollout.max_new_tokens - 1)
        return (*prompts, *(min(n, longest) for n in more if n > prompts[-1]))

    @property
    def cache_blocks(self) -> int:
        """Blocks of a slot: they hold the longest bucket, and the longest prompt with response."""
        rollout = self.rollout
        longest = max(rollout.max_prompt_length + rollout.max_new_tokens, self.prompt_buckets[-1])
        return -(-longest // rollout.cache_block)

    def resume_bucket_of(self, length: int) -> int:
        """The bucket of `length` tokens of prompt and response that are read again."""
        return next(bucket for bucket in self.resume_buckets if length <= bucket)

    def bucket_of(self, length: int) -> int:
        """The prompt bucket of a prompt of `length` tokens, from its own length alone."""
        if not 1 <= length <= self.rollout.max_prompt_length:
            raise ValueError(
                f"a prompt of {length} tokens does not fit rollout.max_prompt_length="
                f"{self.rollout.max_prompt_length} (at least 1): filter it, or raise the key"
            )
        return next(bucket for bucket in self.prompt_buckets if length <= bucket)

    def shapes(self, *, migration: bool = False, resume: bool = False) -> Iterator[Shape]:
        """Every program that generation with this engine compiles.

        `migration` adds those that move live slots with their caches, `resume` those that read
        their tokens again.
        """
        rollout, block = self.rollout, self.rollout.cache_block
        positions = self.cache_blocks * block
        buckets = self.resume_buckets if resume else self.prompt_buckets
        yield Shape("init_decode_state", rollout.slots, positions)
        for bucket in buckets:
            yield Shape("prefill", rollout.prefill_rows, bucket)
        inserted = {-(-bucket // block) * block for bucket in buckets}
        for length in sorted(inserted | ({positions} if migration else set())):
            yield Shape("insert", rollout.prefill_rows, length)
        yield Shape("generate", rollout.slots, rollout.chunk)
        if migration:
            yield Shape("extract", rollout.prefill_rows, positions)
        if migration or resume:
            yield Shape("release", rollout.prefill_rows, positions)

    # ------------------------------------------------------------------ verbs

    def init_decode_state(self) -> DecodeState:
        """All slots empty (done)."""
        return programs.init_decode_state(self)

    def prefill(
        self,
        params: Params,
        tokens: Int[HostArray, "rows T"],
        lengths: Int[HostArray, " rows"],
        sample_ids: Int[HostArray, " rows"],
        max_new: Int[HostArray, " rows"],
        seed_key: Any,
        generated: Int[HostArray, " rows"] | None = None,
    ) -> tuple[Rows, Draw]:
        """Read prompts (right-padded to a bucket) and draw the first token of each response.

        There are always `rollout.prefill_rows` rows. A padding row has sample id -1, length 1 and
        max_new 0; it comes out done, and must go into no slot. A row whose last `generated` tokens
        are response draws the one after them: so goes on a sample whose cache was left behind.
        """
        self._check_rows(tokens.shape[0], "prefill")
        buckets = self.prompt_buckets if generated is None else self.resume_buckets
        if tokens.shape[1] not in buckets:
            raise ValueError(f"prompts padded to {tokens.shape[1]} match no bucket of {buckets}")
        if generated is None:
            generated = np.zeros(self.rollout.prefill_rows, np.int32)
        check_key(seed_key)
        return programs.prefill(
            self, params, tokens, lengths, sample_ids, max_new, generated, seed_key
        )

    def insert(self, state: DecodeState, rows: Rows, slots: Int[HostArray, " rows"]) -> DecodeState:
        """Put row i into slot `slots[i]`, whatever it held; an index >= the slot count drops it.

        `state` is donated. `rows` come from `prefill`, or from `extract` of an engine of the same
        geometry.
        """
        if rows.keys.shape[2] != slots.shape[0] or rows.keys.shape[1] > self.cache_blocks:
            raise ValueError(
                f"rows of shape {rows.keys.shape} do not go into {slots.shape[0]} slots of "
                f"{self.cache_blocks} cache blocks: the engines' geometries differ"
            )
        return programs.insert(self, state, rows, slots)

    def generate(
        self, params: Params, state: DecodeState, seed_key: Any
    ) -> tuple[DecodeState, Chunk]:
        """Up to `rollout.chunk` steps of all live slots in one dispatch. `state` is donated."""
        check_key(seed_key)
        return programs.generate(self, params, state, seed_key)

    def extract(self, state: DecodeState, slots: Int[HostArray, " rows"]) -> Rows:
        """A copy of the rows in `slots`; an index >= the slot count gives a row that is done."""
        return programs.extract(self, state, slots)

    def release(self, state: DecodeState, slots: Int[HostArray, " rows"]) -> DecodeState:
        """Mark `slots` done, as after `extract`; indices >= the slot count do nothing.

        `state` is donated.
        """
        return programs.release(self, state, slots)

    def place_params(self, params: Params) -> Params:
        """`params` in the compute dtype and the sharding of this engine's mesh.

        No copy is made of what has both already: with float32, nothing is but on other devices.
        A program is compiled anew for another sharding, and for arrays bound to no device: placing
        them first keeps the set of programs finite wherever weights come from.
        """
        return jax.device_put(compute_copy(params, self.dtype), self._param_shardings)

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
