"""Compiling everything an engine needs before the first token, and noticing what compiles later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fuse_jax.models.transformer import Params
from fuse_jax.rollout.batcher import prefill_arrays
from fuse_jax.rollout.engine import Engine

COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's event, once a compiled program


@dataclass
class Compilations:
    """Programs compiled inside `count_compilations`, and the seconds they took."""

    count: int = 0
    seconds: float = 0.0


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count what XLA compiles (programs found in the persistent cache count too)."""
    seen = Compilations()

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            seen.count += 1
            seen.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def precompile(
    engine: Engine,
    params: Params,
    seed_key: Any,
    *,
    migration: bool = False,
    resume: bool = False,
) -> Compilations:
    """Run every program of `engine.shapes()` once, on padding rows and empty slots.

    `migration` and `resume` as there. Nothing is left to compile afterwards, however long prompts
    and responses get.
    """
    rollout, params = engine.rollout, engine.place_params(params)
    nowhere = np.full(rollout.prefill_rows, rollout.slots, np.int32)
    with count_compilations() as seen:
        state = engine.init_decode_state()
        for bucket in engine.resume_buckets if resume else engine.prompt_buckets:
            padding = prefill_arrays([], rollout.prefill_rows, bucket)
            none = np.zeros(rollout.prefill_rows, np.int32)
            rows, _ = engine.prefill(params, *padding, seed_key, generated=none)
            state = engine.insert(state, rows, nowhere)
        state, _ = engine.generate(params, state, seed_key)
        if migration:
            state = engine.insert(state, engine.place(engine.extract(state, nowhere)), nowhere)
        if migration or resume:
            state = engine.release(state, nowhere)
        jax.block_until_ready(state)
    return seen
