"""Engines and scorers that take as long as a device of our choice would: real results, slept time.

Many virtual devices on a few cores can't show what overlapping them gains. So a tiny real model
computes, and a native sleep stands for the rest of the device's time; sleeping devices need no
core. A token that each sleep takes from the one before makes every virtual device do one thing at a
time, in the order of dispatch, as an accelerator does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fuse_jax.fusion.intra_stage import native
from fuse_jax.rollout.engine import Chunk, DecodeState, Engine, Rows
from fuse_jax.rollout.sampling import Draw
from fuse_jax.scoring.columns import Column, Model, Role
from fuse_jax.scoring.scorer import Batch, Pending, Scorer

TARGET = "fuse_jax_sleep"


class Pace(NamedTuple):
    """ms that work takes: a decode step `step + live * per_live + context * per_token`, a prefill
    of a bucket of T tokens `prefill + T * prefill_token`, a move, a scoring batch."""

    step: float
    per_live: float
    per_token: float
    prefill: float
    prefill_token: float
    move: float
    score: float


NO_PACE = Pace(*[0.0] * len(Pace._fields))


class Clock:
    """The order of work on one device: the token of its newest sleep."""

    def __init__(self, device: Any) -> None:
        self.token = jax.device_put(jnp.float32(0.0), device)


@functools.cache
def _registered() -> None:
    library = native.load(Path(__file__).with_name("sleep.cc"))
    native.register(library, {TARGET: "FuseJaxSleep"})


def _sleep(ms: Array, token: Array) -> Array:
    """`token`, once the device has slept `ms`.

    The product is there because XLA runs a program of few operations in the thread that dispatches
    it, and would hold up the controller for the whole sleep.
    """
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), jnp.float32))
    square = jnp.arange(1024, dtype=jnp.float32).reshape(32, 32) * token
    return call(ms, token + (square @ square).sum())


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _after_decode(
    pace: Pace, state: DecodeState, chunk: Chunk, token: Array
) -> tuple[DecodeState, Chunk, Array]:
    live = chunk.counts > 0
    context = jnp.max(jnp.where(live, state.lengths, 0)) - chunk.steps / 2
    step = pace.step + pace.per_live * live.sum() + pace.per_token * context
    token = _sleep((chunk.steps * step).astype(jnp.float32), token)
    late = token.astype(jnp.int32)  # 0; makes what is read wait for the sleep
    return (
        state._replace(lengths=state.lengths + late),
        chunk._replace(steps=chunk.steps + late, done=chunk.done | (late > 0)),
        token,
    )


@jax.jit
def _after(ms: Array, results: Any, token: Array) -> tuple[Any, Array]:
    token = _sleep(ms, token)
    return jax.tree.map(lambda x: x + token.astype(x.dtype), results), token


@dataclass(frozen=True)
class PacedEngine(Engine):
    """An engine on one device with the speed of `pace`.

    `lengths[i]`: the response of sample i ends after so many tokens. The controller does not know:
    its requests allow the engine's maximum, as in a run where a stop token ends a response.
    """

    pace: Pace = NO_PACE
    lengths: tuple[int, ...] = ()
    clock: Clock = field(default_factory=lambda: Clock(jax.devices()[0]))

    def __post_init__(self) -> None:
        super().__post_init__()
        _registered()

    def prefill(
        self,
        params: Any,
        tokens: Any,
        lengths: Any,
        sample_ids: Any,
        max_new: Any,
        seed_key: Any,
        generated: Any = None,
    ) -> tuple[Rows, Draw]:
        ends = np.array([self.lengths[i] if i >= 0 else 0 for i in sample_ids], np.int32)
        rows, draw = super().prefill(
            params, tokens, lengths, sample_ids, ends, seed_key, generated=generated
        )
        ms = self.pace.prefill + self.pace.prefill_token * tokens.shape[1]
        late, self.clock.token = _after(np.float32(ms), draw.tokens, self.clock.token)
        return rows._replace(last_tokens=late), draw._replace(tokens=late)

    def generate(self, params: Any, state: DecodeState, seed_key: Any) -> tuple[DecodeState, Chunk]:
        state, chunk = super().generate(params, state, seed_key)
        state, chunk, self.clock.token = _after_decode(self.pace, state, chunk, self.clock.token)
        return state, chunk

    def place(self, rows: Rows) -> Rows:
        rows = super().place(rows)
        late, self.clock.token = _after(np.float32(self.pace.move), rows, self.clock.token)
        return late


class PacedScorer(Scorer):
    """A scorer on one device with the speed of `pace`."""

    def __init__(self, *args: Any, pace: Pace, clock: Clock, **options: Any) -> None:
        super().__init__(*args, **options)
        _registered()
        self._pace, self._clock = pace, clock

    def dispatch(self, column: Column, batch: Batch, models: Mapping[Role, Model]) -> Pending:
        pending = super().dispatch(column, batch, models)
        ms = np.float32(self._pace.score)
        arrays, self._clock.token = _after(ms, pending.arrays, self._clock.token)
        return pending._replace(arrays=arrays)
