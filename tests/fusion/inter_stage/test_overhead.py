"""What is shown of time: the controller's own, and that of samples on the move."""

from __future__ import annotations

import threading
import time
import weakref
from typing import ClassVar

import jax
import numpy as np
import pytest

from fuse_jax.benchmarks import paced
from fuse_jax.fusion.inter_stage import lane as lanes
from fuse_jax.fusion.inter_stage import migration, runtime
from fuse_jax.fusion.inter_stage.job import SHARES
from fuse_jax.fusion.inter_stage.lane import Lane
from fuse_jax.fusion.inter_stage.policy import Move, Plan
from fuse_jax.fusion.inter_stage.readiness import Readiness
from fuse_jax.fusion.inter_stage.stopwatch import Stopwatch
from fuse_jax.fusion.inter_stage.timeline import Timeline
from fuse_jax.rollout.batcher import Progress
from fuse_jax.rollout.engine import Engine
from fuse_jax.scoring.scorer import Pending, Scorer

HANDOFF = Plan("handoff")
NOWHERE = np.array([4, 4], np.int32)  # beyond the last slot


@pytest.fixture
def timeline():
    timeline = Timeline(3)
    yield timeline
    timeline.close()
    while Slow.made:
        Slow.made.pop().set()


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


def test_calls_that_dispatch_and_read_count_as_such(world, slowed, timeline):
    watch = Stopwatch(*SHARES)
    lane = Lane(world.instances[0], world.models, world.seed_key, timeline, watch)
    lane.submit(world.requests(2))
    lane.launch()  # compiles
    lane.collect()
    before = watch.seconds["dispatch"]
    slowed(Engine, "generate", 0.3)
    reads = slowed(lanes, "to_host", 0.1)
    fresh = Lane(world.instances[0], world.models, world.seed_key, timeline, watch)
    fresh.submit(world.requests(2))
    fresh.launch()
    assert watch.seconds["dispatch"] - before >= 0.3
    before = watch.seconds["dispatch"]
    fresh.collect()
    assert reads and watch.seconds["dispatch"] - before >= 0.1 * len(reads)


def test_giving_up_within_a_step_is_the_controllers_own(world, slowed, monkeypatch):
    calls, real = slowed(runtime.Controller, "_restart", 0.1), Engine.generate

    def generate(self, params, state, seed_key):
        if self.mesh.devices.flat[0].id == 0:
            raise RuntimeError("gone")
        return real(self, params, state, seed_key)

    monkeypatch.setattr(Engine, "generate", generate)
    outcome = runtime.run(world.instances, world.job(world.requests(8), HANDOFF))
    assert outcome.counts.failed == 1 and calls
    assert 0.1 * len(calls) <= outcome.counts.seconds["scheduler"] <= outcome.total_ms / 1e3 + 0.1


# What a call is counted as.
KINDS = [
    (Scorer, "lay_out", "host"),
    (Pending, "write", "host"),
    (Progress, "record", "host"),
    (Readiness, "finish", "scheduler"),
    (Timeline, "settle", "scheduler"),
    (Timeline, "dispatched", "scheduler"),
    (Engine, "generate", "dispatch"),
    (Engine, "prefill", "dispatch"),
    (Scorer, "dispatch", "dispatch"),
    (lanes, "to_host", "dispatch"),
    (lanes, "start_copies", "dispatch"),
    (Timeline, "pause", "asleep"),
]


@pytest.mark.parametrize("owner, name, share", KINDS)
def test_a_slow_call_lands_in_one_share(world, slowed, monkeypatch, owner, name, share):
    monkeypatch.setattr(Timeline, "wait", lambda self: None)  # after the run, not counted

    def spent() -> dict[str, float]:
        outcome = runtime.run(world.instances, world.job(world.requests(4), HANDOFF))
        counts = outcome.counts
        for name in SHARES:
            assert 0 < counts.cpu_seconds[name] <= counts.seconds[name] + 0.05
        assert sum(counts.seconds.values()) == pytest.approx(outcome.total_ms / 1e3, abs=0.05)
        assert 0 < counts.watching_cpu_s < outcome.total_ms / 1e3
        return counts.seconds

    def compiled() -> int:
        return sum(one.scorer.compilations for one in world.instances)

    def steady() -> dict[str, float]:
        """Of a run that compiles nothing: who scores what differs between runs."""
        before, found = -1, {}
        while before != compiled():
            calls.clear()
            before, found = compiled(), spent()
        return found

    calls: list[int] = []
    usual = steady()
    calls = slowed(owner, name, 0.04)
    found = steady()
    slept = 0.04 * len(calls)
    assert calls and found[share] >= slept
    # Counted twice, or elsewhere, it would show there. While others sleep the devices go on.
    for other in set(SHARES) - {share, "asleep"}:
        assert found[other] < usual[other] + slept / 2


class Slow:
    """Stands for an array: ready when told."""

    made: ClassVar[list[threading.Event]] = []

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.made.append(self.ready)

    def block_until_ready(self) -> None:
        self.ready.wait()


class Broken(Slow):
    """An array whose program failed."""

    def block_until_ready(self) -> None:
        raise RuntimeError("the program failed")


def dispatch(timeline: Timeline, *instances: int, kind: str = "decode") -> list[Slow]:
    arrays = [Slow() for _ in instances]
    for instance, array in zip(instances, arrays, strict=True):
        timeline.dispatched(instance, kind, array, 1)  # type: ignore[arg-type]
    return arrays


def ended(timeline: Timeline, count: int) -> list[tuple[int, str]]:
    """The next `count` that end."""
    found: list[tuple[int, str]] = []
    for _ in range(count):
        timeline.pause(5.0)
        found += timeline.settle()
        if len(found) >= count:
            return found
    raise AssertionError(f"only {found} ended")


def test_a_timeline_tells_what_ended_and_lets_go_of_it(timeline):
    arrays = dispatch(timeline, 0, 1, 1, 2)
    timeline.pause(0.01)
    assert timeline.settle() == [] and timeline.records == [] and timeline.open
    arrays[3].ready.set()
    assert ended(timeline, 1) == [(2, "decode")]
    arrays[1].ready.set()
    assert ended(timeline, 1) == [(1, "decode")]
    assert timeline.settle() == []
    assert [record.span.instance for record in timeline.records] == [2, 1]
    gone = weakref.ref(arrays.pop())
    assert gone() is None  # it may be a cache


def test_work_of_one_instance_ends_in_order(timeline):
    first, second = dispatch(timeline, 1, 1)
    second.ready.set()
    timeline.pause(0.01)
    assert timeline.settle() == []
    first.ready.set()
    assert ended(timeline, 2) == [(1, "decode")] * 2
    one, other = timeline.spans
    assert one.end <= other.start
    assert not timeline.open


def test_an_end_is_noted_when_it_is_and_not_when_it_is_seen(timeline):
    (array,) = dispatch(timeline, 0)
    array.ready.set()
    timeline.pause(5.0)
    time.sleep(0.2)
    late = timeline.now()
    timeline.settle()
    assert timeline.spans[0].end < late - 100


def test_what_failed_has_ended_too(timeline):
    timeline.dispatched(1, "decode", Broken(), 1)  # type: ignore[arg-type]
    assert ended(timeline, 1) == [(1, "decode")]


def test_what_an_instance_given_up_ends_later_is_not_told(timeline):
    lost, kept = dispatch(timeline, 0, 1)
    timeline.drop(0)
    lost.ready.set()
    kept.ready.set()
    assert ended(timeline, 1) == [(1, "decode")]
    assert not timeline.open and [span.instance for span in timeline.spans] == [1]
    timeline.wait()


def test_a_copy_of_weights_ends_on_its_own_instance(timeline):
    _, fast = dispatch(timeline, 0, 1, kind="weights")
    fast.ready.set()
    assert ended(timeline, 1) == [(1, "weights")]
    assert [span.instance for span in timeline.spans] == [1]


def test_weights_hold_nothing_up(timeline):
    dispatch(timeline, 0, kind="weights")
    (chunk,) = dispatch(timeline, 0)
    chunk.ready.set()
    assert ended(timeline, 1) == [(0, "decode")]


def join_watchers() -> None:
    for thread in threading.enumerate():
        if thread.name == "watcher":
            thread.join(5.0)
            assert not thread.is_alive()


def test_no_thread_outlives_its_run(world):
    runtime.run(world.instances, world.job(world.requests(4), HANDOFF))
    join_watchers()


def test_no_thread_outlives_a_run_that_fails(world, monkeypatch):
    def generate(*_):
        raise RuntimeError("gone")

    monkeypatch.setattr(Engine, "generate", generate)
    with pytest.raises(RuntimeError, match="all 4 instances failed"):
        runtime.run(world.instances, world.job(world.requests(4), HANDOFF))
    join_watchers()


def test_a_watch_runs_for_one_thing_at_a_time():
    watch = Stopwatch("outer", "inner")
    began = time.perf_counter()
    with watch.on("outer"):
        with watch.on("inner"), watch.on("inner"):
            time.sleep(0.02)
        time.sleep(0.03)
    whole = time.perf_counter() - began
    assert watch.seconds["inner"] >= 0.02 and watch.seconds["outer"] >= 0.03
    assert sum(watch.seconds.values()) == pytest.approx(whole, abs=1e-3)
    assert all(watch.cpu[name] <= watch.seconds[name] for name in watch.cpu)


def test_a_paced_move_takes_its_time_once_and_shows_it(world, monkeypatch, timeline):
    ms = 300.0
    slow = world.paced(paced.NO_PACE._replace(move=ms), (32,) * 4)
    shared = (world.models, world.seed_key, timeline, Stopwatch(*SHARES))
    source, target = (Lane(instance, *shared) for instance in slow.instances[:2])
    source.submit(world.requests(2))
    source.launch()
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
