"""Measuring what work costs on an instance, so that plans can be simulated before they run.

Every program is run by itself on empty slots and padding rows: shapes are fixed, so it takes as
long as with real ones. What runs here has been compiled before (`warm_up`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuse_jax.fusion.inter_stage.costs import Costs
from fuse_jax.fusion.inter_stage.fitting import DecodeTime, fit_costs
from fuse_jax.fusion.inter_stage.instances import Instance
from fuse_jax.fusion.inter_stage.policy import Way
from fuse_jax.placement.host import to_host
from fuse_jax.rollout.batcher import prefill_arrays
from fuse_jax.rollout.engine import DecodeState, Engine
from fuse_jax.rollout.warmup import precompile
from fuse_jax.scoring.columns import Model, Role

REPEATS = 3
TRIES = 4  # times as many chunks, where stop tokens end some early


def warm_up(
    instances: Sequence[Instance],
    models: Mapping[Role, Model],
    seed_key: Any,
    *,
    ways: Collection[Way],
) -> int:
    """Compile every program of every instance; returns how many.

    `ways`: how live samples may move. Rows are also sent from each instance to the next, because a
    copy between sub-meshes may need a program of its own.
    """
    count = 0
    for index, instance in enumerate(instances):
        placed = instance.scoring_models(models)
        engine, actor = instance.engine, instance.on_mesh("actor", models["actor"]).params
        kv, resume = "kv" in ways, "prefill" in ways
        count += precompile(engine, actor, seed_key, migration=kv, resume=resume).count
        count += instance.scorer.precompile(placed)
        if kv:
            rows = engine.extract(engine.init_decode_state(), _nowhere(engine))
            other = instances[(index + 1) % len(instances)].engine
            jax.block_until_ready(other.place(rows))
    return count


def measure_costs(
    instances: Sequence[Instance],
    models: Mapping[Role, Model],
    seed_key: Any,
    *,
    ways: Collection[Way],
) -> Costs:
    """The fastest of a few runs of each program on the first instance; a move is from the last.

    `models` are where a run keeps them: those on the host make `weights_ms`. `ways` as in
    `warm_up`: what is not compiled is not measured.
    """
    instance = instances[0]
    engine, scorer = instance.engine, instance.scorer
    actor = engine.place_params(instance.on_mesh("actor", models["actor"]).params)
    decode, host = _decode_times(engine, actor, seed_key)
    buckets = engine.resume_buckets if "prefill" in ways else engine.prompt_buckets
    placed = instance.scoring_models(models)
    score = {
        column: [
            _times(lambda c=column, b=bucket: scorer.dispatch(c, scorer.batch(b, []), placed))
            for bucket in range(len(scorer.buckets))
        ]
        for column in scorer.columns
    }
    return fit_costs(
        decode,
        {bucket: _prefill_times(engine, actor, seed_key, bucket) for bucket in buckets},
        score,
        move=_move_times(instances[-1].engine, engine) if "kv" in ways else (),
        weights=_times(
            lambda: [model.params for model in instance.scoring_models(models).values()]
        ),
        host=host,
    )


def _times(start: Callable[[], Any]) -> list[float]:
    """ms of `start()` until its arrays are ready, the fastest alone: disturbance only adds.

    The first run, which may compile, does not count.
    """
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        result = start()
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(result) if _is_array(leaf)])
        times.append((time.perf_counter() - began) * 1e3)
    return [min(times[1:])]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def _decode_times(
    engine: Engine, actor: Any, seed_key: Any
) -> tuple[list[DecodeTime], list[float]]:
    """Chunks at a few counts of live slots and contexts, and the host's time around each."""
    rollout = engine.rollout
    first, last = rollout.max_prompt_length, rollout.max_prompt_length + rollout.max_new_tokens
    contexts = sorted({first, (first + last) // 2, max(first, last - rollout.chunk)})
    counts = sorted({1, max(1, rollout.slots // 2), rollout.slots})
    decode, host = [], []
    for context in contexts:
        for live in counts:
            runs = _chunk_times(engine, actor, seed_key, live, context)
            decode.append(min((time for time, _ in runs), key=lambda time: time.ms / time.steps))
            host += [ms for _, ms in runs]
    return decode, host


def _chunk_times(
    engine: Engine, actor: Any, seed_key: Any, live: int, context: int
) -> list[tuple[DecodeTime, float]]:
    """REPEATS whole chunks; of fewer that are whole, those with the most steps.

    A chunk ends early when its last live slot draws a stop token. A dispatch would then count as
    few steps, so others are drawn.
    """
    runs = []
    for draw in range(TRIES * REPEATS):
        runs.append(_chunk_time(engine, actor, seed_key, live, context, draw))
        most = max(time.steps for time, _ in runs)
        longest = [run for run in runs if run[0].steps == most]
        if most == engine.rollout.chunk and len(longest) == REPEATS:
            break
    return longest


def _chunk_time(
    engine: Engine, actor: Any, seed_key: Any, live: int, context: int, draw: int
) -> tuple[DecodeTime, float]:
    """One chunk, and the host's ms to dispatch and read it. Another `draw`: other tokens."""
    state = _state(engine, live, context, draw)
    jax.block_until_ready(state)
    began = time.perf_counter()
    _, chunk = engine.generate(actor, state, seed_key)
    returned = time.perf_counter()
    jax.block_until_ready(chunk)
    ready = time.perf_counter()
    to_host(chunk)
    read = time.perf_counter()
    steps = int(chunk.steps)
    device, host = (ready - began) * 1e3, (returned - began + read - ready) * 1e3
    return DecodeTime(live, context + steps / 2, steps, device), host


def _state(engine: Engine, live: int, context: int, draw: int) -> DecodeState:
    """`live` slots that hold `context` tokens (zeros) and may go on; the others are done.

    Their tokens are drawn with ids that no other `draw` has.
    """
    slots, state = engine.rollout.slots, engine.init_decode_state()
    of_slot = {
        "lengths": np.full(slots, context, np.int32),
        "generated": np.ones(slots, np.int32),
        "max_new": np.full(slots, 1 << 30, np.int32),
        "sample_ids": np.arange(draw * slots, (draw + 1) * slots, dtype=np.int32),
        "done": np.arange(slots) >= live,
    }
    row = state.done.sharding
    return state._replace(**{k: jax.device_put(jnp.asarray(v), row) for k, v in of_slot.items()})


def _prefill_times(engine: Engine, actor: Any, seed_key: Any, bucket: int) -> list[float]:
    count = engine.rollout.prefill_rows
    state = engine.init_decode_state()

    def once() -> DecodeState:
        nonlocal state
        none = np.zeros(count, np.int32)
        arrays = prefill_arrays([], count, bucket)
        rows, _ = engine.prefill(actor, *arrays, seed_key, generated=none)
        state = engine.insert(state, rows, _nowhere(engine))
        return state

    return _times(once)


def _move_times(source: Engine, target: Engine) -> list[float]:
    from_, to = source.init_decode_state(), target.init_decode_state()

    def once() -> DecodeState:
        nonlocal to
        rows = source.extract(from_, _nowhere(source))
        to = target.insert(to, target.place(rows), _nowhere(target))
        return to

    return _times(once)


def _nowhere(engine: Engine) -> np.ndarray:
    """Slot indices that drop every row."""
    return np.full(engine.rollout.prefill_rows, engine.rollout.slots, np.int32)
