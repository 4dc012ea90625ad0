"""The simulator: small cases worked out by hand, and what must hold in all."""

import itertools
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_jax.buckets import Bucket
from fuse_jax.fusion.inter_stage import policy
from fuse_jax.fusion.inter_stage.bound import ideal_bound
from fuse_jax.fusion.inter_stage.choose import choose
from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable, Geometry
from fuse_jax.fusion.inter_stage.lengths import LengthHistory
from fuse_jax.fusion.inter_stage.policy import SERIAL, Plan
from fuse_jax.fusion.inter_stage.simulator import simulate
from fuse_jax.fusion.inter_stage.spans import figures
from fuse_jax.fusion.inter_stage.workload import Outcome, Workload

FLAT = DecodeTable((1,), (1,), ((1.0,),))


def bars(outcome: Outcome, instance: int, kind: str) -> list[tuple[float, float]]:
    return [(s.start, s.end) for s in outcome.spans if s.instance == instance and s.kind == kind]


# ------------------------------------------------------------------ by hand

# Two instances of one slot, chunks of 2 steps of 1 ms, prefills of 1 ms, two columns of 5 ms.
PAIR = Geometry(2, 1, 2, 1, (Bucket(32, 1),), ("a", "b"))
PAIR_COSTS = Costs(FLAT, {1: 1.0}, {"a": [5.0], "b": [5.0]})
PAIR_WORK = Workload((1, 1), (3, 9), cap=12)


def test_hand_off():
    """Sample 0: prefill to 1, two steps to 3. Sample 1: eight steps to 9."""
    seen = simulate(Plan("fixed"), PAIR, PAIR_COSTS, PAIR_WORK, record=True)
    assert seen.finished_at.tolist() == [3.0, 9.0]
    # Instance 0 scores sample 0 from 3 on; at 9 instance 1 takes a column of sample 1, and
    # instance 0, busy until 13, has the other one in line.
    assert seen.scored_at.tolist() == [[8.0, 14.0], [13.0, 18.0]]
    assert bars(seen, 0, "score") == [(3.0, 8.0), (8.0, 13.0), (13.0, 18.0)]
    assert (seen.total_ms, seen.generation_ms) == (18.0, 9.0)
    assert (seen.scoring_ms, seen.hidden_ms, seen.scoring_hidden) == (20.0, 6.0, 0.3)
    assert (seen.steps, seen.tokens, seen.batches, seen.padding_rows) == (10, 12, 4, 0)


def test_serial():
    seen = simulate(SERIAL, PAIR, PAIR_COSTS, PAIR_WORK, record=True)
    assert seen.scored_at.tolist() == [[14.0, 14.0], [19.0, 19.0]]
    assert (seen.total_ms, seen.scoring_hidden) == (19.0, 0.0)


def test_weights_come_at_once():
    slow = replace(PAIR_COSTS, weights_ms=4.0)
    seen = simulate(Plan("fixed"), PAIR, slow, PAIR_WORK, record=True)
    assert bars(seen, 0, "weights") == [(0.0, 4.0)]
    assert bars(seen, 0, "score")[0] == (4.0, 9.0)  # finished at 3


def test_host_time_between_dispatches():
    slow = replace(PAIR_COSTS, host_ms=0.5)
    seen = simulate(Plan("fixed"), PAIR, slow, PAIR_WORK, record=True)
    # The first chunk is launched behind the prefill, the next ones ahead: they do not wait.
    assert bars(seen, 1, "decode") == [(1.0, 3.0), (3.0, 5.0), (5.0, 7.0), (7.0, 9.0)]
    # An idle instance waits for the host; its second batch was in line.
    assert bars(seen, 0, "score")[:2] == [(3.5, 8.5), (8.5, 13.5)]


# Two instances of four slots, single steps, free prefills, one column of 4 ms, moves of 2 ms.
FOUR = Geometry(2, 4, 1, 4, (Bucket(32, 1),), ("a",))
FOUR_COSTS = Costs(FLAT, {1: 0.0}, {"a": [4.0]}, move_ms=2.0)
FOUR_WORK = Workload((1,) * 4, (2, 11, 6, 3), cap=12)


def test_migration():
    """Instance 0 has samples of 2 and 6 tokens, instance 1 of 11 and 3.

    At 1 ms three are unfinished: instance 1, with two of them, is kept. The chunk of instance 0
    that is launched ahead ends at 2, then its one sample goes, with 3 of 6 tokens. Instance 1 has a
    chunk to 3 launched, is busy with the move to 5, then decodes both: 3 steps to 8, 7 to 12.
    """
    plan = Plan("fixed", threshold=3, keep=1, way="kv")
    seen = simulate(plan, FOUR, FOUR_COSTS, FOUR_WORK, record=True)
    assert (seen.migrated_at, seen.kept, seen.migrated) == (1.0, (1,), 1)
    assert seen.moves == [policy.Move(0, 1, (2,), "kv", 2.0)]
    assert bars(seen, 1, "move") == [(3.0, 5.0)]
    assert seen.finished_at.tolist() == [1.0, 12.0, 8.0, 2.0]
    assert bars(seen, 0, "score") == [(2.0, 6.0), (6.0, 10.0), (10.0, 14.0)]
    assert bars(seen, 1, "score") == [(12.0, 16.0)]
    assert seen.total_ms == 16.0


def test_without_migration():
    seen = simulate(Plan("fixed"), FOUR, FOUR_COSTS, FOUR_WORK, record=True)
    assert seen.finished_at.tolist() == [1.0, 10.0, 5.0, 2.0]
    assert bars(seen, 0, "score") == [(5.0, 9.0), (9.0, 13.0), (13.0, 17.0)]
    assert seen.total_ms == 17.0


def test_reading_anew_costs_the_destination_a_prefill():
    costs = replace(FOUR_COSTS, prefill_ms={1: 0.0, 4: 1.5})
    plan = Plan("fixed", threshold=3, keep=1)
    seen = simulate(plan, FOUR, costs, FOUR_WORK, record=True)
    assert seen.moves == [policy.Move(0, 1, (2,), "prefill", 1.5)]
    # It draws a token too: two more steps to 6.5, and seven of the other sample to 11.5.
    assert bars(seen, 1, "move") == [(3.0, 4.5)]
    assert seen.finished_at.tolist() == [1.0, 11.5, 6.5, 2.0]


def test_a_shared_backlog():
    """One instance, one slot, prefills of two rows: the third prompt is read when the slot of the
    second is free, and no chunk is launched blindly before."""
    geometry = Geometry(1, 1, 4, 2, (Bucket(32, 8),), ("a",))
    costs = Costs(FLAT, {1: 3.0}, {"a": [5.0]}, host_ms=1.0)
    seen = simulate(Plan("fixed"), geometry, costs, Workload((1,) * 3, (3, 2, 1), 8), record=True)
    # The instance takes a slot's worth, one prompt; then two at once.
    assert bars(seen, 0, "prefill") == [(0.0, 3.0), (5.0, 8.0)]
    assert bars(seen, 0, "decode") == [(3.0, 5.0), (8.0, 9.0), (10.0, 10.0)]
    assert seen.finished_at.tolist() == [5.0, 9.0, 10.0]
    assert (seen.total_ms, seen.batches, seen.padding_rows) == (16.0, 1, 5)


def test_a_slot_is_refilled_before_the_next_chunk():
    """No chunk is launched ahead while prompts wait: all chunks but the last ones are full."""
    geometry = Geometry(1, 2, 2, 1, (Bucket(32, 8),), ("a",))
    costs = Costs(FLAT, {1: 0.0}, {"a": [5.0]})
    work = Workload((1,) * 4, (3, 9, 5, 5), 9)
    seen = simulate(Plan("fixed"), geometry, costs, work, record=True)
    decoding = [span for span in seen.spans if span.kind == "decode"]
    assert [(span.end, span.count) for span in decoding] == [
        *((2.0, 2), (4.0, 2), (6.0, 2), (8.0, 2), (10.0, 1))
    ]
    assert seen.steps == 10


def test_rows_read_beside_the_slots_are_read_again_elsewhere():
    """Instance 3 finishes two samples at once, and reads three prompts of the backlog for its two
    slots. When it leaves, the third is only requeued, and its first token is drawn again."""
    geometry = Geometry(4, 2, 1, 3, (Bucket(64, 1),), ("a",))
    costs = Costs(FLAT, {1: 0.0}, {"a": [1.0]}, move_ms=1.0)
    work = Workload((1,) * 11, (20, 20, 20, 2, 3, 3, 3, 2, 6, 6, 6), 20)
    plan = Plan("fixed", threshold=6, keep=3, way="kv")
    history = LengthHistory((2, 2, 2, 2, 20))  # what is old will become very old
    seen = simulate(plan, geometry, costs, work, history=history, record=True)
    assert seen.kept == (0, 1, 2) and seen.migrated == 2
    assert [(m.sample_ids, m.way) for m in seen.moves if m.way is None] == [((10,), None)]
    assert seen.tokens == sum(work.responses)


def test_no_part_filled_batch_waits_in_line():
    """Instance 0 is done at 1 with three samples, and scores two; the third waits for the one that
    instance 1 finishes at 2, and both go as one batch behind the first."""
    geometry = replace(FOUR, buckets=(Bucket(32, 2),))
    work = Workload((1,) * 5, (2, 3, 2, 12, 2), 12)
    seen = simulate(Plan("fixed"), geometry, FOUR_COSTS, work, record=True)
    assert bars(seen, 0, "score")[:2] == [(1.0, 5.0), (5.0, 9.0)]
    assert (seen.batches, seen.padding_rows) == (3, 1)


def test_decoding_costs_what_the_table_says():
    """Live slots and context (of the longest, or the mean) in the middle of each chunk."""
    geometry = Geometry(1, 2, 2, 2, (Bucket(32, 2),), ("a",))
    table = DecodeTable((1, 2), (0, 100), ((1.0, 101.0), (2.0, 202.0)))
    work = Workload((1, 5), (3, 5), 8)
    costs = Costs(table, {8: 0.0}, {"a": [1.0]})
    seen = simulate(SERIAL, geometry, costs, work, record=True)
    # Two live, the longer at 5 + 1, in the middle at 7: 2 x (2 + 14); one at 8 to 9: 2 x (1 + 9).
    assert bars(seen, 0, "decode") == [(0.0, 32.0), (32.0, 52.0)]
    mean = replace(costs, decode=replace(table, statistic="mean"))
    seen = simulate(SERIAL, geometry, mean, work, record=True)
    assert bars(seen, 0, "decode")[0] == (0.0, 24.0)  # mean of 2 and 6, in the middle 5: 2 x 12
    # Once the longest is done, the other one counts: at 4 to 6 two steps of (1 + 5).
    seen = simulate(SERIAL, geometry, costs, Workload((5, 1), (3, 5), 8), record=True)
    assert bars(seen, 0, "decode") == [(0.0, 32.0), (32.0, 44.0)]


def test_streaming_scores_between_chunks():
    """Instance 0 has four samples of 2 tokens and one of 6, instance 1 five of 12: at 1 ms four
    are due, and what is left of instance 0 is one of six samples that may be the last."""
    geometry = Geometry(2, 5, 1, 5, (Bucket(32, 1),), ("a",))
    costs = Costs(FLAT, {1: 0.0}, {"a": [1.5]})
    work = Workload((1,) * 10, (2, 12, 2, 12, 2, 12, 2, 12, 6, 12), 12)
    history = LengthHistory((2, 3, 6, 12))
    plans = Plan("fixed"), Plan("stream", stream=True)
    apart, seen = (
        simulate(plan, geometry, costs, work, history=history, record=True) for plan in plans
    )
    assert bars(apart, 0, "score")[0] == (5.0, 6.5)
    # Behind the chunk that was launched ahead, one batch in flight at a time.
    assert bars(seen, 0, "score")[:2] == [(2.0, 3.5), (5.5, 7.0)]
    assert bars(seen, 0, "decode")[2:5] == [(3.5, 4.5), (4.5, 5.5), (7.0, 8.0)]
    # Any of the five of instance 1 may be the last: it scores when they are done, no later for it.
    assert bars(seen, 1, "score")[0] == (11.0, 12.5)
    assert (apart.generation_ms, seen.generation_ms) == (11.0, 11.0)
    assert seen.total_ms <= apart.total_ms


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (lambda: Workload((), (), 4), "responses"),
        (lambda: Workload((1,), (5,), 4), "cap"),
        (lambda: Workload((1,), (0,), 4), "cap"),
        (lambda: Workload((0,), (1,), 4), "prompts"),
        (lambda: Workload((1, 1), (1,), 4), "prompts"),
        (lambda: Workload((1,), (1,), 4, (1.0, 2.0)), "predicted"),
    ],
)
def test_workloads_that_cannot_be(work, name):
    with pytest.raises(ValueError, match=name):
        work()


def test_a_sample_without_a_bucket_is_refused():
    with pytest.raises(ValueError, match="bucket"):
        simulate(SERIAL, FOUR, FOUR_COSTS, Workload((1,), (40,), 40))


# ------------------------------------------------------------------ in all cases

STEPS = st.sampled_from([0.5, 1.0, 1.5, 4.0])


@st.composite
def cases(draw):
    """(geometry, costs, workload, history, plan), small and odd."""
    integers = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    columns = ("a", "b", "c")[: integers(1, 3)]
    rows = integers(1, 4)
    buckets = (Bucket(8, rows), Bucket(16, integers(1, 4)), Bucket(40, 1))
    geometry = Geometry(
        integers(1, 6), integers(1, 5), integers(1, 4), integers(1, 4), buckets, columns
    )
    first, more, longer = draw(STEPS), draw(STEPS), draw(STEPS)
    table = ((first, first + longer), (first + more, first + more + 2 * longer))
    decode = DecodeTable((1, 4), (1, 40), table, draw(st.sampled_from(["longest", "mean"])))
    costs = Costs(
        decode,
        {4: draw(STEPS), 8: draw(STEPS), 40: draw(STEPS)},
        {column: [draw(STEPS) * (i + 1) for i in range(3)] for column in columns},
        move_ms=draw(STEPS),
        move_token_ms=draw(st.sampled_from([0.0, 0.1])),
        weights_ms=draw(st.sampled_from([0.0, 7.0])),
        host_ms=draw(st.sampled_from([0.0, 0.25])),
    )
    count, cap = integers(1, 24), integers(1, 24)
    lengths = st.lists(st.integers(1, cap), min_size=count, max_size=count)
    prompts = st.lists(st.integers(1, 8), min_size=count, max_size=count)
    predicted = st.lists(st.floats(0, 30), min_size=count, max_size=count) | st.just([])
    work = Workload(tuple(draw(prompts)), tuple(draw(lengths)), cap, tuple(draw(predicted)))
    history = LengthHistory(tuple(draw(st.lists(st.integers(1, cap), max_size=6))))
    plan = Plan(
        "fixed",
        handoff=draw(st.booleans()),
        threshold=integers(0, 30),
        keep=integers(1, 6),
        stream=draw(st.booleans()),
        pack=draw(st.booleans()),
        way=draw(st.sampled_from(["auto", "kv", "prefill"])),
    )
    if not plan.handoff:
        plan = replace(SERIAL)
    return geometry, costs, work, history, plan


@given(cases())
@settings(max_examples=250, deadline=None)
def test_what_must_hold(case):
    geometry, costs, work, history, plan = case
    seen = simulate(plan, geometry, costs, work, history=history, record=True)
    count = len(work.responses)
    # Every sample is finished once and scored once a column, after it was finished.
    assert np.isfinite(seen.finished_at).all() and np.isfinite(seen.scored_at).all()
    assert (seen.scored_at >= seen.finished_at).all()
    scored = Counter[str]()
    for span in seen.spans:
        if span.kind == "score":
            scored[span.name] += span.count
    assert scored == dict.fromkeys(geometry.columns, count)
    # Tokens are conserved, and each is drawn in a dispatched step or a prefill.
    assert seen.tokens == sum(work.responses)
    # A device does one thing at a time, in slots it has.
    for index in range(geometry.instances):
        own = [s for s in seen.spans if s.instance == index and s.kind != "weights"]
        assert all(b.start >= a.end for a, b in itertools.pairwise(own))
        assert all(s.count <= geometry.slots for s in own if s.kind == "decode")
    # One migration at most, to at most m instances, of samples that leave the others.
    moved = [i for move in seen.moves for i in move.sample_ids]
    assert len(set(moved)) == len(moved) and len(seen.kept) <= plan.keep
    assert all(m.destination in seen.kept and m.source not in seen.kept for m in seen.moves)
    # Nothing beats the bound, and the figures agree with the spans.
    assert seen.total_ms >= ideal_bound(geometry, costs, work) * (1 - 1e-9)
    drawn = figures(seen.spans, geometry.instances)
    assert drawn.total_ms == seen.total_ms
    assert seen.scoring_ms == pytest.approx(
        sum(s.end - s.start for s in seen.spans if s.kind == "score")
    )
    if not plan.handoff:
        assert min(s.start for s in seen.spans if s.kind == "score") >= seen.generation_ms


def test_a_token_drawn_by_a_prefill_does_not_beat_the_bound():
    geometry = Geometry(3, 2, 1, 1, (Bucket(8, 1),), ("a", "b"))
    table = DecodeTable((1, 4), (1, 40), ((0.5, 1.0), (0.75, 1.5)))
    costs = Costs(table, {4: 0.5, 8: 0.5}, {"a": [0.5], "b": [0.5]}, 0.5, 0.1)
    work = Workload((1,) * 3, (1, 1, 4), 4, (0.0,) * 3)
    seen = simulate(Plan("fixed", threshold=2, keep=1), geometry, costs, work)
    assert seen.migrated == 1 and seen.total_ms == pytest.approx(ideal_bound(geometry, costs, work))


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_same_again(case):
    geometry, costs, work, history, plan = case
    runs = [simulate(plan, geometry, costs, work, history=history, record=True) for _ in "ab"]
    assert runs[0].spans == runs[1].spans and runs[0].moves == runs[1].moves
    quiet = simulate(plan, geometry, costs, work, history=history)
    assert quiet.total_ms == runs[0].total_ms and not quiet.spans


@given(cases(), st.sampled_from([1.5, 2.0, 8.0]))
@settings(max_examples=100, deadline=None)
def test_dearer_scoring_is_never_faster(case, factor):
    """Serial: exactly so much slower. Fused: batches of one row leave no room for anomalies but
    the last batch's, which may find itself behind another one."""
    geometry, costs, work, history, plan = case
    geometry = replace(geometry, buckets=tuple(Bucket(b.length, 1) for b in geometry.buckets))
    dear = {column: [ms * factor for ms in times] for column, times in costs.score_ms.items()}
    costs = replace(costs, host_ms=0.0, weights_ms=0.0)
    runs = [
        simulate(plan, geometry, each, work, history=history)
        for each in (costs, replace(costs, score_ms=dear))
    ]
    if not plan.handoff:
        tails = [run.total_ms - run.generation_ms for run in runs]
        assert tails[1] == pytest.approx(factor * tails[0])
    elif not plan.stream:
        batch = max(max(costs.score_ms[column]) for column in geometry.columns)
        assert runs[1].total_ms >= runs[0].total_ms - policy.BATCHES_IN_FLIGHT * batch


@given(cases())
@settings(max_examples=25, deadline=None)
def test_auto_is_never_predicted_slower_than_serial(case):
    geometry, costs, work, history, _ = case
    plan = choose("auto", geometry, costs, work.prompts, history, work.cap, draws=2)
    if history.lengths:
        assert plan.predicted_ms is not None and plan.serial_ms is not None
        assert plan.predicted_ms <= plan.serial_ms
        assert plan.handoff is (plan.predicted_ms < plan.serial_ms)
    assert plan.why


def test_ten_thousand_samples_on_64_instances():
    generator = np.random.default_rng(0)
    drawn = np.clip(np.round(50 * np.exp(generator.standard_normal(10_000))), 1, 512)
    lengths = tuple(drawn.astype(int).tolist())
    geometry = Geometry(64, 32, 8, 8, (Bucket(64, 32), Bucket(528, 4)), ("a", "b", "c"))
    costs = Costs(FLAT, {16: 4.0}, {column: [6.0, 6.0] for column in "abc"}, move_ms=1.0)
    started = time.process_time()
    plan = Plan("fixed", threshold=1024, keep=40)
    seen = simulate(plan, geometry, costs, Workload((16,) * 10_000, lengths, 512))
    assert time.process_time() - started < 10.0
    assert seen.migrated > 100 and seen.tokens == sum(lengths)
