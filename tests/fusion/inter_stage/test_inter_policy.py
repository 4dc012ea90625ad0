"""Policy decisions by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse_jax.buckets import Bucket
from fuse_jax.fusion.inter_stage import policy
from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable, Geometry
from fuse_jax.fusion.inter_stage.lateness import CHUNKS, Lateness
from fuse_jax.fusion.inter_stage.lengths import LengthHistory
from fuse_jax.fusion.inter_stage.policy import InstanceView, Move, Plan, Unfinished

FLAT = DecodeTable((1,), (1,), ((1.0,),))
GEOMETRY = Geometry(4, 4, 2, 2, (Bucket(8, 4), Bucket(16, 2)), ("a", "b"))
COSTS = Costs(FLAT, {8: 3.0, 16: 5.0}, {"a": [2.0, 3.0], "b": [4.0, 1.0]}, move_ms=4.0)
NOTHING = LengthHistory()


def samples(first: int, generated: list[int], *, prompt: int = 2, cap: int = 10):
    return tuple(Unfinished(first + i, prompt, g, cap) for i, g in enumerate(generated))


# ------------------------------------------------------------------ prompts to instances


def test_assign_spreads_the_longest_and_keeps_the_rest_shared():
    given_, backlog = policy.assign([5, 9, 1, 7, 3], instances=2, slots=2)
    assert given_ == [[1, 4], [3, 0]]  # 9, then 7, then 5 to the lesser load, then 3
    assert backlog == [2]


def test_assign_gives_no_more_than_slots():
    # By load the last two would go to instance 1 as well.
    assert policy.assign([9, 1, 1, 1], instances=2, slots=2) == ([[0, 3], [1, 2]], [])


def test_packing_keeps_alike_lengths_together():
    given_, backlog = policy.assign([5, 9, 1, 7, 3, 2], instances=2, slots=2, pack=True)
    assert (given_, backlog) == ([[1, 3], [0, 4]], [5, 2])
    assert policy.assign([4, 6, 5], instances=4, slots=2, pack=True) == ([[1], [2], [0], []], [])


def test_equal_predictions_are_dealt_in_turn():
    assert policy.assign([1.0] * 5, 2, 8) == ([[0, 2, 4], [1, 3]], [])
    assert policy.dispatch([0.0] * 4, 2) == [0, 1, 0, 1]


def test_dispatch_avoids_the_loaded_and_the_failed():
    assert policy.dispatch([5, 4, 3], 3, loads=[math.inf, 0, 6]) == [1, 1, 2]
    with pytest.raises(ValueError, match="loads"):
        policy.dispatch([1.0], 2, loads=[math.inf, math.inf])


def test_whole_prefills_are_pulled():
    assert [policy.pull(free, 9, GEOMETRY) for free in (0, 1, 2, 3)] == [0, 2, 2, 4]
    assert policy.pull(3, 1, GEOMETRY) == 1


# ------------------------------------------------------------------ migration


@pytest.mark.parametrize(
    ("unfinished", "generating", "backlog", "due"),
    [
        (6, 4, 0, True),
        (7, 4, 0, False),  # more than R_t
        (6, 4, 1, False),  # prompts not taken yet
        (6, 2, 0, False),  # nothing to leave
        (0, 0, 0, False),
    ],
)
def test_migration_is_due(unfinished, generating, backlog, due):
    plan = Plan("fixed", threshold=6, keep=2)
    assert policy.must_migrate(plan, GEOMETRY.slots, unfinished, generating, backlog) is due


def test_migration_waits_until_the_kept_have_room():
    plan = Plan("fixed", threshold=100, keep=2)
    assert not policy.must_migrate(plan, 4, 9, 4, 0)
    assert policy.must_migrate(plan, 4, 8, 4, 0)


def test_the_busiest_are_kept():
    history = LengthHistory((4, 8))
    views = [
        InstanceView(samples(0, [1, 1])),  # 2 x (6 - 1)
        InstanceView(samples(2, [5, 5, 5])),  # 3 x (8 - 5)
        InstanceView(samples(5, [0]), samples(6, [0])),  # 12
        InstanceView(samples(7, [0, 0, 0, 0]), alive=False),
    ]
    assert [policy.remaining_work(view, history) for view in views[:3]] == [10.0, 9.0, 12.0]
    assert policy.choose_kept(Plan("fixed", keep=2), views, history) == (0, 2)


def test_what_has_nothing_to_generate_is_not_kept():
    views = [InstanceView(()), InstanceView(samples(0, [1])), InstanceView(())]
    assert policy.choose_kept(Plan("fixed", keep=2), views, NOTHING) == (1,)


def moves(views, source, kept, plan=None, **costs) -> list[Move]:
    return policy.moves_from(
        source,
        views,
        kept,
        plan=plan or Plan("fixed", threshold=8, keep=2),
        geometry=GEOMETRY,
        costs=replace(COSTS, **costs),
    )


def test_moves_fill_the_emptiest_first_and_stay_together():
    views = [
        InstanceView(samples(0, [1, 1, 1])),
        InstanceView(samples(3, [1])),
        InstanceView(samples(4, [1, 1, 1])),
        InstanceView(()),
    ]
    # 7 samples on 2 instances: level 4. Instance 1 takes 3, in groups of at most prefill_rows = 2.
    found = moves(views, 2, (0, 1))
    assert [(m.destination, m.sample_ids) for m in found] == [(1, (4, 5)), (1, (6,))]


def test_waiting_prompts_are_only_requeued():
    views = [InstanceView(samples(0, [1])), InstanceView(samples(1, [1]), samples(2, [0]))]
    found = moves(views, 1, (0,))
    assert [(m.sample_ids, m.way) for m in found] == [((1,), "prefill"), ((2,), None)]
    assert found[1].predicted_ms == 0.0


def test_the_cheaper_way_is_taken():
    views = [InstanceView(samples(0, [1])), InstanceView(samples(1, [1, 3]))]
    # Two contexts of 3 and 5 tokens: one prefill of 3 ms, against 4 ms for the cache.
    assert [(m.way, m.predicted_ms) for m in moves(views, 1, (0,))] == [("prefill", 3.0)]
    assert [(m.way, m.predicted_ms) for m in moves(views, 1, (0,), move_ms=2.9)] == [("kv", 2.9)]
    forced = Plan("fixed", threshold=8, keep=1, way="kv")
    assert [(m.way, m.predicted_ms) for m in moves(views, 1, (0,), forced)] == [("kv", 4.0)]
    # No bucket to read 17 tokens in: the cache, at any price.
    long = [views[0], InstanceView(samples(1, [9], prompt=8))]
    assert [m.way for m in moves(long, 1, (0,), move_ms=1e6)] == ["kv"]


def test_moves_that_find_no_slot_are_refused():
    full = InstanceView(samples(0, [1] * 4))
    with pytest.raises(ValueError, match="slots"):
        moves([full, InstanceView(samples(4, [1]))], 1, (0,))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=6), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_live_sample_finds_a_slot(counts, keep):
    first = [sum(counts[:i]) for i in range(len(counts))]
    views = [InstanceView(samples(f, [1] * c)) for f, c in zip(first, counts, strict=True)]
    plan = Plan("fixed", threshold=1000, keep=keep)
    if not policy.must_migrate(plan, GEOMETRY.slots, sum(counts), sum(map(bool, counts)), 0):
        return
    kept = policy.choose_kept(plan, views, NOTHING)
    moved = []
    for source in range(len(views)):
        if source in kept or not views[source].live:
            continue
        for move in moves(views, source, kept, plan):
            moved += move.sample_ids
            assert len(move.sample_ids) <= GEOMETRY.prefill_rows
            target = views[move.destination]
            gone = [s for s in views[source].live if s.sample_id in move.sample_ids]
            views[move.destination] = target._replace(live=(*target.live, *gone))
        views[source] = InstanceView(())
    assert sum(len(v.live) for v in views) == sum(counts)
    assert max(len(v.live) for v in views) <= GEOMETRY.slots
    # None is fuller than it must be, but for what it had.
    level = -(-sum(counts) // len(kept))
    assert all(len(views[k].live) <= max(level, counts[k]) for k in kept)


# ------------------------------------------------------------------ scoring


def test_who_may_score():
    handed = Plan("fixed")
    assert policy.may_score(handed, 5, 0)
    assert not policy.may_score(handed, 5, 1)
    assert not policy.may_score(policy.SERIAL, 5, 0)
    assert policy.may_score(policy.SERIAL, 0, 0)


@pytest.mark.parametrize(
    ("ready", "part_filled", "picked"),
    [
        ({"a": [0, 0], "b": [0, 0]}, True, None),
        ({"a": [3, 1], "b": [3, 1]}, False, None),
        ({"a": [4, 2], "b": [4, 2]}, True, ("b", 0)),  # the dearest full one
        ({"a": [4, 1], "b": [3, 1]}, True, ("a", 0)),  # full before part-filled
        # 1.5, 1.5, 1 and 0.5 ms of work; a batch of the second takes longer than of the first.
        ({"a": [3, 1], "b": [1, 1]}, True, ("a", 1)),
        ({"a": [0, 1], "b": [3, 1]}, True, ("b", 0)),
    ],
)
def test_the_next_batch(ready, part_filled, picked):
    batches = policy.scoring_batches(GEOMETRY, COSTS)
    assert policy.next_batch(ready, batches, part_filled=part_filled) == picked


def test_streaming_is_for_those_unlikely_to_be_last():
    # Chances 1/8, 3/8 and 1/2 of being last; 1/6 is the limit for three.
    assert [policy.may_stream([1, 3, 4], i) for i in range(3)] == [True, False, False]
    assert not policy.may_stream([0, 0, 0], 0)  # nothing known


def test_expected_end_and_who_outlasts_it():
    history = LengthHistory((2, 4, 6, 8))
    # One sample that has 4: half of those beyond (6, 8) is the 8. 4 steps of 1 ms.
    ages, none = policy.Ages([4], [], [12], 16), policy.Ages([], [], [], 0)
    assert policy.expected_end(10.0, ages, history, GEOMETRY, COSTS) == 14.0
    assert policy.expected_end(10.0, none, history, GEOMETRY, COSTS) == 10.0
    assert policy.outlasting(10.0, ages, history, COSTS, horizon=13.0) == 0.5
    assert policy.outlasting(10.0, ages, history, COSTS, horizon=14.0) == 0.5
    assert policy.outlasting(10.0, ages, history, COSTS, horizon=15.0) == 0.0
    assert policy.outlasting(10.0, none, history, COSTS, horizon=12.0) == 0.0
    # Waiting prompts take slots first: expected 5 tokens each, over 4 slots.
    later = policy.Ages([4], [0], [12], 16)
    assert policy.expected_end(10.0, later, history, GEOMETRY, COSTS) == 10.0 + 6 + 1.25


def test_an_instance_is_looked_at_when_its_prospects_may_have_changed():
    """At the start, when a sample has finished, and every few chunks; and only if one asks."""
    history, looked = LengthHistory((2, 4, 6, 8)), []
    lateness = Lateness(GEOMETRY, history, COSTS)

    def ages(index: int) -> policy.Ages:
        looked.append(index)
        return policy.Ages([index], [], [index + 2], 10)

    def look() -> list[int]:
        looked.clear()
        lateness.of_all(ages)
        return sorted(looked)

    everyone = list(range(GEOMETRY.instances))
    assert look() == everyone and look() == []
    ends = [policy.expected_end(0.0, ages(i), history, GEOMETRY, COSTS) for i in everyone]
    late = [policy.outlasting(0.0, ages(i), history, COSTS, max(ends)) for i in everyone]
    assert lateness.of_all(ages) == late and len(set(late)) > 1
    for _ in range(CHUNKS - 1):
        lateness.read(0, 5.0, finished=False)
    assert look() == []
    lateness.read(0, 5.0, finished=False)
    assert look() == [0]
    lateness.read(1, 5.0, finished=True)
    lateness.read(0, 5.0, finished=False)
    assert look() == [1]
    lateness.note(0, 6.0)
    assert look() == [0]
