"""Instances that fail one after the other, or while they are handed work: each is lost alone."""

from __future__ import annotations

import dataclasses

import pytest

from fuse_jax.fusion.inter_stage import runtime
from fuse_jax.fusion.inter_stage.lane import Lane
from fuse_jax.fusion.inter_stage.policy import Plan
from fuse_jax.rollout.engine import Engine

HANDOFF = Plan("handoff")


class Fragile(Engine):
    """An engine whose calls ask `trips` first, by name and device; it raises what it likes."""

    def generate(self, params, state, seed_key):
        trip(self, "generate")
        return super().generate(params, state, seed_key)

    def prefill(self, *args, **more):
        trip(self, "prefill")
        return super().prefill(*args, **more)

    def init_decode_state(self):
        trip(self, "init_decode_state")
        return super().init_decode_state()

    def insert(self, state, rows, slots):
        trip(self, "insert")
        return super().insert(state, rows, slots)

    def place_params(self, params):
        trip(self, "place_params")
        return super().place_params(params)

    def bucket_of(self, length):
        trip(self, "bucket_of")
        return super().bucket_of(length)


def trip(engine, name):
    left = trips.get((engine.mesh.devices.flat[0].id, name))
    if left is not None:
        left.pop(0)()


def fail():
    raise RuntimeError("the device fell off the bus")


def fine():
    pass


trips: dict = {}


def fragile(world, index, **calls):
    """Instance `index`, whose named calls do what their lists say, and then fail for ever."""
    instance = world.instances[index]
    fields = {f.name: getattr(instance.engine, f.name) for f in dataclasses.fields(Engine)}
    engine = Fragile(**fields)
    for name, steps in calls.items():
        trips[engine.mesh.devices.flat[0].id, name] = [*steps, *[fail] * 100]
    return dataclasses.replace(instance, engine=engine)


@pytest.fixture(autouse=True)
def dead_rest(monkeypatch):
    """What is dispatched to an instance after it was given up."""
    trips.clear()
    asked = []
    for name in ("bring_weights", "score", "wants_more"):
        real = getattr(Lane, name)

        def spy(self, *args, real=real, name=name):
            if not self.alive:
                asked.append((self.index, name))
            return real(self, *args)

        monkeypatch.setattr(Lane, name, spy)
    yield
    trips.clear()
    assert asked == []


def test_an_instance_that_fails_at_launch_is_left_alone(world, same):
    requests = world.requests(16)
    instances = [fragile(world, 0, generate=[fine]), *world.instances[1:]]
    outcome = runtime.run(instances, world.job(requests, HANDOFF))
    assert outcome.counts.failed == 1
    assert not [s for s in outcome.timeline.spans if s.instance == 0 and s.kind == "weights"]
    same(outcome.samples, outcome.scored, world.expected(requests))


def test_a_failure_that_ends_a_second_instance_ends_no_more(world, same):
    """Samples of the first are queued on the second, which fails at that; prompts still wait."""
    requests = world.requests(40)
    second = fragile(world, 1, bucket_of=[])
    key = next(iter(trips))
    steps, trips[key] = [fail, *[fine] * 1000], [fine] * 1000

    def first_fails():
        trips[key] = steps
        fail()

    first = fragile(world, 0, generate=[fine, first_fails])
    instances = [first, second, *world.instances[2:]]
    outcome = runtime.run(instances, world.job(requests, HANDOFF))
    assert outcome.counts.failed == 2
    same(outcome.samples, outcome.scored, world.expected(requests))


def test_what_a_failure_leaves_goes_to_an_instance_that_had_its_turn(world):
    requests = world.requests(1)
    instances = [*world.instances[:3], fragile(world, 3, generate=[])]
    controller = runtime.Controller(instances, world.job(requests, HANDOFF))
    controller._submit(controller.lanes[3], requests)
    controller._ask_all()
    controller._decide()
    assert not controller.lanes[3].alive
    assert any(lane.in_flight for lane in controller.lanes)


def test_an_instance_that_cannot_begin_loses_no_prompt(world):
    requests = world.requests(6)
    instances = [fragile(world, 0, place_params=[]), *world.instances[1:]]
    controller = runtime.Controller(instances, world.job(requests, HANDOFF))
    controller.backlog.extend(requests)
    controller._launch(controller.lanes[0])
    assert [lane.alive for lane in controller.lanes] == [False, True, True, True]
    assert list(controller.backlog) == requests


def test_a_cache_is_made_once_while_prompts_wait(world, same):
    """All slots of an instance fall free at once, again and again."""
    requests = world.requests(40, 1)
    instances = [fragile(world, i, place_params=[fine]) for i in range(4)]
    outcome = runtime.run(instances, world.job(requests, HANDOFF))
    assert outcome.counts.failed == 0
    same(outcome.samples, outcome.scored, world.expected(requests))


def test_the_cache_goes_when_nothing_waits(world):
    controller = runtime.Controller(world.instances, world.job(world.requests(24, 1), HANDOFF))
    controller.run()
    assert all(lane._batcher is None for lane in controller.lanes)


@pytest.mark.parametrize("prompts", [1, 16])
@pytest.mark.parametrize(
    "call", ["place_params", "init_decode_state", "prefill", "insert", "generate"]
)
@pytest.mark.parametrize("well", [0, 1])
def test_whichever_call_fails_no_prompt_is_lost(world, same, call, prompts, well):
    """The first or the second time that an instance is asked for anything of the engine."""
    requests = world.requests(prompts)
    undisturbed = runtime.run(world.instances, world.job(requests, HANDOFF))
    broken = fragile(world, 0, **{call: [fine] * well})
    mine = runtime.run([broken, *world.instances[1:]], world.job(requests, HANDOFF))
    same(mine.samples, mine.scored, (undisturbed.samples, undisturbed.scored))
