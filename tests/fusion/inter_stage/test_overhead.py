"""What is shown of time: the controller's own, and that of samples on the move."""

from __future__ import annotations

import dataclasses
import time
import weakref

import jax
import numpy as np
import pytest

from fuse_jax.benchmarks import paced
from fuse_jax.buckets import Bucket
from fuse_jax.fusion.inter_stage import lane as lanes
from fuse_jax.fusion.inter_stage import migration, runtime
from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable, Geometry
from fuse_jax.fusion.inter_stage.lane import Lane
from fuse_jax.fusion.inter_stage.policy import Move, Plan
from fuse_jax.fusion.inter_stage.readiness import Readiness
from fuse_jax.fusion.inter_stage.stopwatch import Stopwatch
from fuse_jax.fusion.inter_stage.timeline import Timeline
from fuse_jax.rollout.engine import Engine
from fuse_jax.scoring.scorer import Pending, Scorer

HANDOFF = Plan("handoff")
NOWHERE = np.array([4, 4], np.int32)  # beyond the last slot


@pytest.fixture
def slowed(monkeypatch):
    """Makes a method sleep first; returns a list as long as its calls."""

    def slow(owner, name, seconds):
        calls, real = [], getattr(owner, name)

        def slept(*args, **options):
            calls.append(1)
            time.sleep(seconds)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, slept)
        return calls

    return slow


def test_host_work_around_a_dispatch_is_the_controllers_own(world, slowed):
    calls = slowed(Scorer, "lay_out", 0.02)
    outcome = runtime.run(world.instances, world.job(world.requests(16), HANDOFF))
    assert outcome.counts.scheduler_s >= 0.02 * len(calls)


def test_calls_that_dispatch_and_read_are_not(world, slowed):
    away = Stopwatch()
    lane = Lane(world.instances[0], world.models, world.seed_key, Timeline(1), away)
    lane.batcher.submit(world.requests(2))
    lane.batcher.launch()  # compiles
    lane.collect()
    before = away.seconds
    slowed(Engine, "generate", 0.3)
    reads = slowed(lanes, "to_host", 0.1)
    fresh = Lane(world.instances[0], world.models, world.seed_key, Timeline(1), away)
    fresh.batcher.submit(world.requests(2))
    fresh.batcher.launch()
    assert away.seconds - before >= 0.3
    before = away.seconds
    fresh.collect()
    assert reads and away.seconds - before >= 0.1 * len(reads)


def test_giving_up_within_a_step_is_the_controllers_own(world, slowed, monkeypatch):
    calls, real = slowed(runtime.Controller, "_restart", 0.1), Engine.generate

    def generate(self, params, state, seed_key):
        if self.mesh.devices.flat[0].id == 0:
            raise RuntimeError("gone")
        return real(self, params, state, seed_key)

    monkeypatch.setattr(Engine, "generate", generate)
    outcome = runtime.run(world.instances, world.job(world.requests(8), HANDOFF))
    assert outcome.counts.failed == 1 and calls
    assert 0.1 * len(calls) <= outcome.counts.scheduler_s <= outcome.total_ms / 1e3 + 0.1


# Where a call is counted: the controller's own time, dispatching, or sleep.
KINDS = [
    (Scorer, "lay_out", 0),
    (Pending, "write", 0),
    (Readiness, "finish", 0),
    (Timeline, "settle", 0),
    (Engine, "generate", 1),
    (Engine, "prefill", 1),
    (Scorer, "dispatch", 1),
    (lanes, "to_host", 1),
    (lanes, "start_copies", 1),
]


@pytest.mark.parametrize("owner, name, bucket", KINDS)
def test_a_slow_call_lands_in_one_bucket(world, slowed, owner, name, bucket):
    def spent() -> tuple[float, ...]:
        controller = runtime.Controller(world.instances, world.job(world.requests(4), HANDOFF))
        counts = controller.run().counts
        assert 0 < counts.scheduler_cpu_s <= counts.scheduler_s + 0.05
        assert 0 < counts.dispatch_cpu_s <= counts.dispatch_s + 0.05
        return counts.scheduler_s, counts.dispatch_s

    spent()  # compiles
    usual = spent()
    calls = slowed(owner, name, 0.04)
    found = spent()
    slept = 0.04 * len(calls)
    assert calls and found[bucket] >= slept
    # Counted in both, or in the other, it would show there.
    assert found[1 - bucket] < usual[1 - bucket] + slept / 2


def test_devices_with_work_ahead_are_looked_at_less_often():
    geometry = Geometry(2, 4, 8, 4, (Bucket(44, 2),), ("values",))

    def pauses(step: float, score: float) -> tuple[float, ...]:
        costs = Costs(DecodeTable((1,), (16,), ((step,),)), {16: 1.0}, {"values": (score,)})
        return runtime.long_pauses(costs, geometry)

    assert pauses(6.0, 96.0) == (3e-3, 6e-3)  # an eighth of a chunk of 48 ms
    assert pauses(12.0, 40.0) == (2.5e-3, 5e-3)  # or of a scoring batch
    assert pauses(1e3, 1e4)[-1] == 1e-2
    short = pauses(0.1, 0.1)
    assert short[0] == 1e-4 and 1.6e-3 < short[-1] <= 3.2e-3


class Slow:
    """Stands for an array: ready when told."""

    ready = False

    def is_ready(self) -> bool:
        return self.ready


def test_a_timeline_tells_where_something_ended_and_lets_go_of_it():
    timeline, arrays = Timeline(3), [Slow() for _ in range(4)]
    for instance, array in zip((0, 1, 1, 2), arrays, strict=True):
        timeline.dispatched(instance, "decode", array, 1)  # type: ignore[arg-type]
    assert timeline.settle() == [] and timeline.records == []
    arrays[1].ready = arrays[3].ready = True
    assert timeline.settle() == [1, 2] and timeline.settle() == []
    assert [record.span.instance for record in timeline.records] == [1, 2]
    gone = weakref.ref(arrays.pop())
    del array
    assert gone() is None  # it may be a cache


def test_a_copy_of_weights_ends_on_its_own_instance():
    timeline, slow, fast = Timeline(2), Slow(), Slow()
    timeline.dispatched(0, "weights", slow, 1)  # type: ignore[arg-type]
    timeline.dispatched(1, "weights", fast, 1)  # type: ignore[arg-type]
    fast.ready = True
    timeline.settle()
    assert [span.instance for span in timeline.spans] == [1]


def test_one_watch_within_another_counts_once():
    watch = Stopwatch()
    began = time.perf_counter()
    with watch, watch:
        time.sleep(0.02)
    assert 0.02 <= watch.seconds <= time.perf_counter() - began


def test_a_paced_move_takes_its_time_once_and_shows_it(world, monkeypatch):
    ms = 300.0
    pair = []
    timeline = Timeline(2)
    for index in range(2):
        instance = world.instances[index]
        fields = {f.name: getattr(instance.engine, f.name) for f in dataclasses.fields(Engine)}
        clock = paced.Clock(instance.engine.mesh.devices.flat[0])
        pace = paced.NO_PACE._replace(move=ms)
        engine = paced.PacedEngine(**fields, pace=pace, lengths=(32,) * 4, clock=clock)
        instance = dataclasses.replace(instance, engine=engine)
        pair.append(Lane(instance, world.models, world.seed_key, timeline, Stopwatch()))
    source, target = pair
    source.batcher.submit(world.requests(2))
    source.batcher.launch()
    source.collect()
    rows = source.batcher.engine.extract(source.batcher.state, NOWHERE)
    jax.block_until_ready(target.batcher.engine.place(rows))  # compiles

    sleeps = []
    real = paced._after
    monkeypatch.setattr(paced, "_after", lambda *args: sleeps.append(args[0]) or real(*args))
    move = Move(0, 1, (0, 1), "kv", 0.0)
    rows, samples = migration.take(source, move)
    migration.give(target, move, rows, samples)
    timeline.wait()
    assert [float(one) for one in sleeps] == [ms]
    span = next(span for span in timeline.spans if span.kind == "move")
    assert span.end - span.start >= ms / 3  # what is left of it after the dispatch
