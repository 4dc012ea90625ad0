"""The live controller: the serial path's bits, whatever moves, fails or is late; nothing lost."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

from fuse_jax.benchmarks import paced
from fuse_jax.fusion.inter_stage import migration, policy, runtime
from fuse_jax.fusion.inter_stage.instances import Instance
from fuse_jax.fusion.inter_stage.policy import SERIAL, Plan
from fuse_jax.rollout.batcher import Batcher, Progress
from fuse_jax.rollout.engine import Engine
from fuse_jax.scoring.reward_function import RewardFunction
from fuse_jax.scoring.sample_rewards import TextRewards
from fuse_jax.scoring.scorer import Scorer

HANDOFF = Plan("handoff")
MOVED = Plan("fixed", threshold=8, keep=2, way="kv")
STREAM = Plan("stream", stream=True)


class Broken(Engine):
    """An engine whose decode raises from its second chunk on."""

    def generate(self, params, state, seed_key):
        chunks[self.mesh.devices.flat[0].id] = chunks.get(self.mesh.devices.flat[0].id, 0) + 1
        if chunks[self.mesh.devices.flat[0].id] > 1:
            raise RuntimeError("the device fell off the bus")
        return super().generate(params, state, seed_key)


class BrokenScorer(Scorer):
    """A scorer whose every dispatch raises."""

    def dispatch(self, column, batch, models):
        raise RuntimeError("out of memory")


chunks: dict[int, int] = {}


def broken(instance: Instance) -> Instance:
    fields = {f.name: getattr(instance.engine, f.name) for f in dataclasses.fields(Engine)}
    chunks.clear()
    return dataclasses.replace(instance, engine=Broken(**fields))


def ids_of(outcome):
    return [sample.sample_id for sample in outcome.samples]


@pytest.mark.parametrize("plan", [SERIAL, HANDOFF, MOVED, STREAM], ids=lambda plan: plan.policy)
def test_every_plan_gives_the_serial_bits(world, same, plan):
    requests = world.requests(24)
    outcome = runtime.run(world.instances, world.job(requests, plan))
    same(outcome.samples, outcome.scored, world.expected(requests))
    assert outcome.counts.failed == outcome.counts.rerun == 0


@pytest.mark.parametrize(
    ("count", "caps"),
    [(1, 32), (3, 32), (16, 1), (24, 1), (16, [1 + i % 2 * 31 for i in range(16)])],
    ids=["one prompt", "fewer than slots", "length one", "length one, refilled", "1 and 32"],
)
def test_odd_workloads_come_out_whole(world, same, count, caps):
    requests = world.requests(count, caps)
    for plan in (SERIAL, MOVED):
        outcome = runtime.run(world.instances, world.job(requests, plan))
        same(outcome.samples, outcome.scored, world.expected(requests))


def test_all_at_the_cap(world, same):
    lengths = [len(sample.response_tokens) for sample in world.expected(world.requests(16))[0]]
    requests = world.requests(16, [max(1, length - 1) for length in lengths])
    outcome = runtime.run(world.instances, world.job(requests, MOVED))
    same(outcome.samples, outcome.scored, world.expected(requests))
    at_cap = [sample.truncated for sample, n in zip(outcome.samples, lengths, strict=True) if n > 1]
    assert at_cap and all(at_cap)


def test_one_instance_hands_over_and_moves_nothing(world, same):
    requests = world.requests(6)
    outcome = runtime.run(world.instances[:1], world.job(requests, MOVED))
    same(outcome.samples, outcome.scored, world.expected(requests))
    assert outcome.counts.migrated == 0


# ------------------------------------------------------------------ migration


def forced_moves(monkeypatch, rng, slots_moved):
    """Migrations at random moments, from random instances to random ones, by the cache."""
    real = runtime.Controller._decide

    def decide(self):
        for lane in self._alive():
            lane.leaving = lane.leaving or (bool(lane.unfinished) and rng.random() < 0.2)
        if all(lane.leaving for lane in self.lanes):
            self.lanes[rng.integers(len(self.lanes))].leaving = False
        real(self)

    def depart(self, source):
        source.leaving = False
        batcher = source.batcher
        for slot, progress in list(batcher.live.items()):
            free = [
                lane
                for lane in self.lanes
                if lane is not source and len(lane.batcher.live) < self.geometry.slots
            ]
            if not free:
                continue
            target = free[rng.integers(len(free))]
            sample = progress.request.sample_id
            self._move(source, policy.Move(source.index, target.index, (sample,), "kv", 0.0))
            slots_moved.add((source.index, slot))
        source.retire()

    monkeypatch.setattr(runtime.Controller, "_decide", decide)
    monkeypatch.setattr(runtime.Controller, "_depart", depart)


def check_forced(world, same, monkeypatch, seed, requests, expected):
    slots_moved: set[tuple[int, int]] = set()
    rng = np.random.default_rng(seed)
    forced_moves(monkeypatch, rng, slots_moved)
    wanted = len(world.instances) * world.instances[0].engine.rollout.slots
    for _ in range(60):
        outcome = runtime.run(world.instances, world.job(requests, HANDOFF))
        assert outcome.counts.failed == 0
        same(outcome.samples, outcome.scored, expected)
        if len(slots_moved) == wanted:
            return outcome
    raise AssertionError(f"only {len(slots_moved)} of {wanted} slots have moved")


def test_bits_survive_moves_until_every_slot_has_moved(world, same, monkeypatch):
    requests = world.requests(24)
    check_forced(world, same, monkeypatch, 0, requests, world.expected(requests))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_bits_survive_moves_with_many_seeds(world, same, monkeypatch, seed):
    requests = world.requests(24, seed=seed)
    check_forced(world, same, monkeypatch, seed, requests, world.expected(requests))


def tails(world):
    """A short and a long response on each instance: at the threshold each has one left."""
    pool = world.requests(40)
    lengths = [len(sample.response_tokens) for sample in world.expected(pool)[0]]
    long = [r for r, length in zip(pool, lengths, strict=True) if length > 20][:4]
    short = [dataclasses.replace(r, max_new_tokens=2) for r in pool if r not in long][:4]
    return short + long


def moved(world, requests, way):
    """A run in which samples moved. Devices that share a few cores may be done before they do."""
    plan = Plan("fixed", threshold=4, keep=1, way=way)
    runs = (runtime.run(world.instances, world.job(requests, plan)) for _ in range(8))
    return next(outcome for outcome in runs if outcome.counts.migrated)


def test_the_tail_moves_with_its_caches(world, same):
    requests = tails(world)
    outcome = moved(world, requests, "kv")
    assert "kv" in {record.span.name for record in outcome.timeline.records}
    same(outcome.samples, outcome.scored, world.expected(requests))


def test_a_tail_read_again_agrees_within_the_margin(world):
    requests = tails(world)
    outcome = moved(world, requests, "prefill")
    assert "prefill" in {record.span.name for record in outcome.timeline.records}
    differing = 0
    for mine, other in zip(outcome.samples, world.expected(requests)[0], strict=True):
        length = min(len(mine.response_tokens), len(other.response_tokens))
        unequal = np.flatnonzero(mine.response_tokens[:length] != other.response_tokens[:length])
        first = int(unequal[0]) if len(unequal) else length
        np.testing.assert_allclose(mine.log_probs[:first], other.log_probs[:first], atol=1e-5)
        if len(unequal):
            differing += 1
            assert other.gaps[first] < 1e-4
    assert differing == 0  # no draw here is that close


# ------------------------------------------------------------------ hand-off


CHUNK_MS = 200.0
PACE = paced.NO_PACE._replace(step=CHUNK_MS / 4)  # chunks of 4 steps


@pytest.fixture
def one_long(world):
    """Slow chunks; a long and a shorter response on the first instance, short ones elsewhere."""
    lengths = (32, 2, 2, 2, 12, 2, 2, 2)
    slow = world.paced(PACE, lengths)
    requests = slow.requests(8, caps=lengths)
    job = slow.job(requests, HANDOFF)

    def run():
        """One in which nothing is compiled: who scores what differs between runs."""
        before, outcome = -1, None
        while before != (before := sum(one.scorer.compilations for one in slow.instances)):
            outcome = runtime.run(slow.instances, job)
        return outcome

    return run


def waits(outcome):
    """ms from the end of a sample to the dispatch of its first scoring, of those that ended while
    the first instance went on to generate and others were free; by the instance they ended on."""
    found = {}
    last = max(finish.at for finish in outcome.timeline.finishes)
    for finish in outcome.timeline.finishes:
        if finish.at < last - 2 * CHUNK_MS:
            records = outcome.timeline.records
            scored = [r.dispatched for r in records if finish.sample_id in r.samples]
            found.setdefault(finish.instance, []).append(min(scored) - finish.at)
    return found


def test_a_finished_sample_is_scored_within_a_chunk(one_long):
    found = waits(one_long())
    assert sorted(found) == [0, 1, 2, 3]  # also of an instance that has to go on generating
    assert max(itertools.chain(*found.values())) <= CHUNK_MS


def test_a_barrier_instead_of_the_hand_off_is_noticed(one_long, monkeypatch):
    monkeypatch.setattr(policy, "may_score", lambda plan, unfinished, backlog: not unfinished)
    assert max(itertools.chain(*waits(one_long()).values())) > CHUNK_MS


def test_the_tail_moves_as_soon_as_its_last_chunk_is_read(world):
    slow = world.paced(PACE, (20, 20, *(2,) * 6))
    job = slow.job(slow.requests(8), Plan("fixed", threshold=2, keep=1, way="kv"))

    def wait() -> float:
        records = runtime.run(slow.instances, job).timeline.records
        (move,) = [r for r in records if r.span.kind == "move"]
        source = 1 - move.span.instance
        decoded = [r.span for r in records if r.span.kind == "decode"]
        return move.dispatched - max(s.end for s in decoded if s.instance == source)

    waits = sorted(wait() for _ in range(4))  # the first move from or to an instance compiles
    assert waits[1] < CHUNK_MS


def test_what_an_idle_instance_is_given_it_starts_at_once(world):
    requests = world.requests(1)
    controller = runtime.Controller(world.instances, world.job(requests, MOVED))
    kept, source = controller.lanes[:2]
    source.submit(requests)
    controller.kept, source.leaving = (kept.index,), True
    controller._changed = {source.index: source}
    controller._decide()
    assert kept.in_flight and source._batcher is None


def test_streaming_waits_for_the_weights(world, monkeypatch):
    """Else the chunk behind the batch waits for them too."""
    controller = runtime.Controller(world.instances, world.job(world.requests(4), STREAM))
    lane, scored = controller.lanes[0], []
    monkeypatch.setattr(policy, "may_stream", lambda late, instance: True)
    monkeypatch.setattr(controller, "_score", lambda *args: scored.append(args))
    for position in range(4):
        controller.table.finish(position, 0)
    lane.bring_weights()
    controller._stream(lane)
    assert lane.has_weights and not scored
    while not lane.weights_here:
        controller.timeline.pause(20.0)
        controller._read()
    controller._stream(lane)
    assert scored == [(lane, *controller._next_batch(part_filled=True))]
    controller.timeline.close()


def test_serial_scores_nothing_before_the_last_sample(world):
    outcome = runtime.run(world.instances, world.job(world.requests(16), SERIAL))
    last = max(finish.order for finish in outcome.timeline.finishes)
    scores = [r for r in outcome.timeline.records if r.span.kind == "score"]
    assert scores and min(record.order for record in scores) > last


def test_an_instance_scores_once_it_has_nothing_to_generate(world):
    outcome = runtime.run(world.instances, world.job(world.requests(24), HANDOFF))
    last, first = {}, {}
    for finish in outcome.timeline.finishes:
        last[finish.instance] = finish.order
    for record in outcome.timeline.records:
        if record.span.kind == "score":
            index = record.span.instance
            first[index] = min(first.get(index, record.order), record.order)
    assert last and all(first[index] > last[index] for index in last if index in first)
    assert min(first.values()) < max(last.values())  # while others generate


# ------------------------------------------------------------------ rewards


def text_rewards(function):
    return TextRewards(function, lambda tokens: " ".join(map(str, tokens)))


def test_bad_rewards_exclude_their_samples_and_no_other(world, same):
    def reward(prompt: str, response: str, meta: dict) -> float:
        length = len(response.split())
        if length % 3 == 0:
            raise ValueError("no idea")
        return math.nan if length % 3 == 1 else float(length)

    requests = world.requests(18)
    with pytest.warns(UserWarning, match="runs in this process"):
        function = RewardFunction(reward)
    job = world.job(requests, MOVED, text_rewards=text_rewards(function))
    outcome = runtime.run(world.instances, job)
    same(outcome.samples, outcome.scored, world.expected(requests))
    assert len(outcome.rewards) == len(requests)
    for sample, result in zip(outcome.samples, outcome.rewards, strict=True):
        length = len(sample.response_tokens)
        assert result.valid == (length % 3 == 2)
        assert result.score == length if result.valid else math.isnan(result.score)


def test_a_reward_that_hangs_is_given_up(world, tmp_path):
    source = tmp_path / "hangs.py"
    source.write_text(
        "import time\n"
        "def reward(prompt, response, meta):\n"
        "    if len(response.split()) == 1:\n"
        "        time.sleep(60)\n"
        "    return 1.0\n"
    )
    requests = world.requests(6, [1, 5, 5, 5, 5, 5])
    with RewardFunction(f"{source}:reward", workers=2, timeout=0.5) as function:
        job = world.job(requests, HANDOFF, text_rewards=text_rewards(function))
        outcome = runtime.run(world.instances, job)
    lengths = [len(sample.response_tokens) for sample in outcome.samples]
    assert [result.valid for result in outcome.rewards] == [length > 1 for length in lengths]
    assert outcome.rewards[0].reason.startswith("timeout")


# ------------------------------------------------------------------ failure


@pytest.mark.parametrize("step", ["submit", "give", "sample"])
def test_a_step_that_fails_part_way_loses_no_sample_and_has_none_twice(
    world, same, monkeypatch, step
):
    """Once, after it has done its work (`sample`: instead, amid the others' of a chunk).

    What was done stands: those samples are the instance's, to be taken from it when it is given up.
    """
    owner = {"submit": Batcher, "give": migration, "sample": Progress}[step]
    at = 1 if step == "give" else 2
    real, calls = getattr(owner, step), []

    def breaks(*args):
        calls.append(step)
        breaks_now = len(calls) == at
        done = None if breaks_now and step == "sample" else real(*args)
        if breaks_now:
            raise RuntimeError("broken")
        return done

    requests = world.requests(24, 1) if step == "sample" else tails(world)
    expected = world.expected(requests)
    monkeypatch.setattr(owner, step, breaks)
    plan = Plan("fixed", threshold=4, keep=1, way="kv")
    for _ in range(8):  # until something moves
        outcome = runtime.run(world.instances, world.job(requests, plan))
        same(outcome.samples, outcome.scored, expected)
        if len(calls) >= at:
            break
    assert outcome.counts.failed == 1


@pytest.mark.parametrize("plan", [HANDOFF, MOVED], ids=lambda plan: plan.policy)
def test_samples_of_a_failed_instance_run_elsewhere(world, same, plan):
    requests = world.requests(24)
    instances = [broken(world.instances[0]), *world.instances[1:]]
    outcome = runtime.run(instances, world.job(requests, plan))
    assert outcome.counts.failed == 1
    assert outcome.counts.rerun >= 1
    same(outcome.samples, outcome.scored, world.expected(requests))


def test_scores_of_a_failed_scorer_are_given_again(world, same):
    requests = world.requests(10)
    first = world.instances[0]
    scorer = BrokenScorer(
        first.scorer.mesh,
        first.scorer.buckets,
        first.scorer.columns,
        max_response=32,
        options=first.scorer.options,
    )
    instances = [dataclasses.replace(first, scorer=scorer), *world.instances[1:]]
    outcome = runtime.run(instances, world.job(requests, HANDOFF))
    assert outcome.counts.failed == 1
    same(outcome.samples, outcome.scored, world.expected(requests))


def test_the_failure_of_all_instances_is_raised(world):
    instances = [broken(world.instances[0])]
    with pytest.raises(RuntimeError, match="all 1 instances failed") as caught:
        runtime.run(instances, world.job(world.requests(3), HANDOFF))
    assert "fell off the bus" in str(caught.value.__cause__)


def test_bad_requests_are_the_callers_error(world):
    requests = world.requests(2)
    with pytest.raises(ValueError, match="same sample id"):
        runtime.run(world.instances, world.job([requests[0], requests[0]], HANDOFF))
    long = dataclasses.replace(requests[0], prompt_tokens=np.zeros(13, np.int32))
    with pytest.raises(ValueError, match="max_prompt_length"):
        runtime.run(world.instances, world.job([long], HANDOFF))


# ------------------------------------------------------------------ what is shown


def test_the_timeline_holds_every_kind_of_work_without_overlap(world, tmp_path):
    outcome = runtime.run(world.instances, world.job(world.requests(24), MOVED))
    spans = outcome.timeline.spans
    assert {span.kind for span in spans} >= {"prefill", "decode", "weights", "score"}
    for instance in range(len(world.instances)):
        mine = [s for s in spans if s.instance == instance and s.kind != "weights"]
        mine.sort(key=lambda span: (span.start, span.end))
        for one, other in itertools.pairwise(mine):
            assert other.start >= one.end - 1e-6
    outcome.timeline.write(tmp_path / "trace.json")
    assert "instance 0" in (tmp_path / "trace.json").read_text()


def test_shared_parameters_are_no_copies(world):
    first = world.instances[0]
    model = first.on_mesh("critic", world.models["critic"])
    device = first.engine.mesh.devices.flat[0]
    for mine, whole in zip(
        jax.tree.leaves(model.params), jax.tree.leaves(world.models["critic"].params), strict=True
    ):
        held = next(s.data for s in whole.addressable_shards if s.device == device)
        assert mine.unsafe_buffer_pointer() == held.unsafe_buffer_pointer()
