"""What is shown of time: the controller's own, and that of samples on the move."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import ClassVar

import jax
import numpy as np
import pytest

from fuse_jax.benchmarks import paced
from fuse_jax.benchmarks.measure import controller_apart
from fuse_jax.fusion.inter_stage import lane as lanes
from fuse_jax.fusion.inter_stage import migration, runtime, stopwatch, watchers
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


@pytest.fixture
def clock(monkeypatch):
    """The stopwatch's clock, which a call can put forward; returns how."""
    ahead = [0.0]

    monkeypatch.setattr(stopwatch, "perf_counter", lambda: time.perf_counter() + ahead[0])

    def forward(seconds):
        ahead[0] += seconds

    return forward


@pytest.mark.parametrize("owner, name, share", KINDS)
def test_a_call_counts_in_one_share(world, monkeypatch, clock, owner, name, share):
    hours, calls, real = 3600.0, [], getattr(owner, name)

    def call(*args, **options):
        calls.append(1)
        clock(hours)
        return real(*args, **options)

    monkeypatch.setattr(owner, name, call)
    monkeypatch.setattr(Timeline, "wait", lambda self: None)  # after the run, not counted
    counts = runtime.run(world.instances, world.job(world.requests(4), HANDOFF)).counts
    assert calls
    for other in SHARES:
        assert counts.seconds[other] // hours == (len(calls) if other == share else 0)
        assert 0 < counts.seconds[other] % hours < 600
    assert counts.watching_cpu_s > 0


def test_garbage_is_looked_for_among_new_objects_only(world, monkeypatch):
    frozen, real = [], Engine.generate

    def generate(self, params, state, seed_key):
        frozen.append(gc.get_freeze_count())
        return real(self, params, state, seed_key)

    monkeypatch.setattr(Engine, "generate", generate)
    job = world.job(world.requests(4), HANDOFF)
    assert gc.get_freeze_count() == 0
    runtime.run(world.instances, job)
    assert min(frozen) > 10_000 and gc.get_freeze_count() == 0
    gc.freeze()
    try:
        runtime.run(world.instances, job)
        assert gc.get_freeze_count() > 10_000  # still the caller's
    finally:
        gc.unfreeze()


class Slow:
    """Stands for an array: ready when told."""

    made: ClassVar[list[threading.Event]] = []

    def __init__(self) -> None:
        self.ready, self.awaited = threading.Event(), threading.Event()
        self.made.append(self.ready)

    def block_until_ready(self) -> None:
        self.awaited.set()
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
    end = time.monotonic() + 20.0
    while len(found) < count and time.monotonic() < end:
        timeline.pause(1.0)
        found += timeline.settle()
    return found


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


def test_who_is_waited_for_long_is_said(timeline, monkeypatch, caplog):
    (array,) = dispatch(timeline, 1)
    with monkeypatch.context() as hurry:
        hurry.setattr(timeline._watchers, "wait", lambda seconds: None)
        for _ in range(10):
            timeline.pause(30.0)
    said = [record.message for record in caplog.records if "ended anything" in record.message]
    assert len(said) == 3  # after 60, 120 and 240 s
    assert all("waited for: instance 1 (" in message for message in said)
    array.ready.set()
    assert ended(timeline, 1) == [(1, "decode")]
    timeline.pause(0.01)
    assert len(caplog.records) == len(said)


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
    assert lost.awaited.wait(20.0)  # too late to be forgotten: it will be told of
    timeline.drop(0)
    lost.ready.set()
    timeline.pause(20.0)
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


@pytest.fixture
def threads(monkeypatch):
    """The threads that this test's runs start."""
    mine: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
    monkeypatch.setattr(watchers, "THREADS", mine)
    seen, close = [], Timeline.close

    def closed(timeline):
        seen.extend(mine)
        close(timeline)

    monkeypatch.setattr(Timeline, "close", closed)
    return seen


def all_end(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(20.0)
    return bool(threads) and not any(thread.is_alive() for thread in threads)


def test_no_thread_outlives_its_run(world, threads):
    runtime.run(world.instances, world.job(world.requests(4), HANDOFF))
    assert all_end(threads)


def test_no_thread_outlives_a_run_that_fails(world, threads, monkeypatch):
    def generate(*_):
        raise RuntimeError("gone")

    monkeypatch.setattr(Engine, "generate", generate)
    with pytest.raises(RuntimeError, match="all 4 instances failed"):
        runtime.run(world.instances, world.job(world.requests(4), HANDOFF))
    assert all_end(threads)


LEAVES = """
import sys, time
import jax, jax.numpy as jnp
from fuse_jax.fusion.inter_stage.timeline import Timeline
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda i, y: jnp.tanh(y @ y), x))
x = jnp.ones((400, 400))
slow(x).block_until_ready()
timeline = Timeline(1)
timeline.dispatched(0, "decode", slow(x), 1)
timeline.pause(0.01)
timeline.close()
sys.exit(7)
"""


def test_a_program_ends_in_order_while_a_device_works():
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no thread is bound to cores here")
def test_a_paced_run_leaves_the_controller_a_core():
    cores = os.sched_getaffinity(0)
    with pytest.raises(KeyError), controller_apart():
        assert len(os.sched_getaffinity(0)) == 1
        raise KeyError
    assert os.sched_getaffinity(0) == cores


def test_a_watch_runs_for_one_thing_at_a_time(clock):
    watch = Stopwatch("outer", "inner")
    clock(1e3)
    with watch.on("outer"):
        clock(1e4)
        with watch.on("inner"):
            clock(1e5)
            with watch.on("inner"), watch.on("outer"):
                clock(1e6)
        clock(2e4)
    clock(1e3)
    assert watch.seconds == pytest.approx({"outer": 1.03e6, "inner": 1e5}, abs=100)


def test_a_paced_move_takes_its_time_once_and_shows_it(world, monkeypatch, timeline):
    ms = 300.0
    slow = world.paced(paced.NO_PACE._replace(move=ms), (32,) * 4)
    shared = (world.models, world.seed_key, timeline, Stopwatch(*SHARES))
    source, target = (Lane(instance, *shared) for instance in slow.instances[:2])
    source.submit(world.requests(2))
    source.launch()
    source.collect()
    rows = source.batcher.engine.extract(source.batcher.state, NOWHERE)
    batcher = target.batcher
    jax.block_until_ready(batcher.engine.place(rows))  # compiles, as does what comes after it
    batcher.state = batcher.engine.insert(batcher.state, batcher.engine.place(rows), NOWHERE)

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
