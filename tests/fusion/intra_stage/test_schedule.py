"""A schedule's rules, times, memory and text, against hand-computed values."""

import numpy as np
import pytest

from fuse_jax.fusion.intra_stage.cost import COST_MODELS, TransportError
from fuse_jax.fusion.intra_stage.problem import Problem
from fuse_jax.fusion.intra_stage.schedule import CsvError, Schedule, ScheduleError, Task


def tiny(**extra):
    """Two devices, two micro-batches, both models of two stages: F 1, B 2 and F 1, B 1."""
    actor = {"stages": 2, "micro_batches": 2, "forward": 1, "backward": 2, "activation": 1}
    critic = {"stages": 2, "micro_batches": 2, "forward": 1, "backward": 1, "activation": 0.5}
    return Problem.from_dict({"actor": actor, "critic": critic, **extra})


def rows(problem, strings):
    """Rows from strings such as "aF0 cB1"."""
    model = {"a": "actor", "c": "critic"}
    return Schedule.from_tasks(
        problem,
        [
            [Task(d, model[w[0]], 0, w[1], int(w[2:])) for w in string.split()]
            for d, string in enumerate(strings)
        ],
    )


GOOD = ("aF0 aF1 cF0 cB0 aB0 cF1 cB1 aB1", "cF0 cF1 aF0 aB0 cB0 aF1 aB1 cB1")


def test_times_and_memory_by_hand():
    schedule = rows(tiny(), GOOD).check()
    timing = schedule.timing()
    start = [timing.start[row].tolist() for row in schedule.order]
    # device 0: cF0 takes an input that ends at 1; aB0 waits for device 1's aB0 (3 to 5)
    assert start[0] == [0, 1000, 2000, 3000, 5000, 7000, 8000, 9000]
    # device 1: nothing waits
    assert start[1] == [0, 1000, 2000, 3000, 5000, 6000, 7000, 9000]
    assert schedule.makespan() == 11.0
    assert schedule.peaks().tolist() == [2.5, 2.0]
    held = (schedule.memory_profile()[0] / 1e6).tolist()
    assert held == [1, 2, 2.5, 2.5, 2, 1.5, 1.5, 1]
    assert schedule.busy() == pytest.approx(20 / 22)


def test_cost_models_by_hand():
    """One replica of two stages, one micro-batch, no other model: F F B B with hand-offs."""
    model = {"stages": 2, "micro_batches": 1, "forward": 1, "backward": 2, "lag": 0.5}
    problem = Problem.from_dict({"actor": model, "critic": {**model, "micro_batches": 0}})
    schedule = Schedule.from_tasks(
        problem,
        [
            [Task(0, "actor", 0, kind, 0) for kind in "FB"],
            [Task(1, "actor", 0, k, 0) for k in "FB"],
        ],
    )
    found = {name: schedule.makespan(name) for name in COST_MODELS}
    assert found == {
        "ideal": 7.0,
        "rendezvous": 7.0,
        "neighbour": 7.0,
        "lockstep": 7.0,
        "deferred": 7.0,
    }


def test_blocking_transfers_cost_what_they_block():
    """Device 1 is in a long task when device 0 wants to send: a rendezvous waits, a mailbox does
    not.
    """
    actor = {"stages": 2, "micro_batches": 2, "forward": 1, "backward": 1}
    critic = {"stages": 2, "micro_batches": 2, "forward": 10, "backward": 10}
    problem = Problem.from_dict({"actor": actor, "critic": critic})
    schedule = rows(
        problem, ("aF0 aF1 cF0 cB0 cF1 cB1 aB0 aB1", "cF0 cF1 aF0 aB0 aF1 aB1 cB0 cB1")
    ).check()
    ideal = schedule.timing()
    second = schedule.order[0, 1]
    assert ideal.start[second] == 1000
    for name in ("rendezvous", "neighbour", "lockstep"):
        assert schedule.timing(name).start[second] == 10000  # after device 1's cF0
        assert schedule.makespan(name) > schedule.makespan()
    assert schedule.makespan() <= schedule.makespan("deferred")


@pytest.mark.parametrize("name", COST_MODELS)
def test_no_cost_model_beats_the_ideal(name):
    schedule = rows(tiny(), GOOD)
    timing, ideal = schedule.timing(name), schedule.timing()
    assert (timing.start >= ideal.start).all()
    graph = schedule.graph
    assert (timing.end - timing.start == graph.duration).all()
    for row in schedule.order:
        assert (timing.start[row][1:] >= timing.end[row][:-1]).all()
    after = np.flatnonzero(graph.pred[:, 0] >= 0)
    assert (timing.start[after] >= timing.end[graph.pred[after, 0]]).all()


def test_ring_refuses_distant_transfers():
    problem = Problem.from_dict(
        {
            "actor": {"stages": 3, "micro_batches": 1, "forward": 1, "backward": 1, "chunks": 2},
            "critic": {"stages": 3, "micro_batches": 0, "forward": 1, "backward": 1},
        }
    )
    row = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    schedule = Schedule.from_tasks(
        problem, [[Task(d, "actor", 0, kind, 0, c) for kind, c in row] for d in range(3)]
    ).check()
    with pytest.raises(TransportError, match="spans 2 devices"):
        schedule.makespan("neighbour")
    with pytest.raises(TransportError, match="one of"):
        schedule.makespan("pigeon")
    assert "chunk" in schedule.to_csv().splitlines()[0]
    assert (Schedule.from_csv(problem, schedule.to_csv()).order == schedule.order).all()


def test_tail_counts_after_the_last_backward_only():
    plain = {"stages": 1, "micro_batches": 1, "forward": 1, "backward": 1}
    problem = Problem.from_dict({"actor": {**plain, "tail": 5}, "critic": plain})
    first = rows(problem, ("aF0 aB0 cF0 cB0",))
    assert first.makespan() == 7.0
    assert rows(problem, ("cF0 cB0 aF0 aB0",)).makespan() == 9.0


def test_broken_rules_are_named():
    problem = tiny()
    order = rows(problem, GOOD).order
    late = order.copy()
    late[0, [0, 1]] = late[0, [1, 0]]
    assert [v.rule for v in Schedule(problem, late).violations()] == ["order"]

    doubled = order.copy()
    doubled[0, 0] = doubled[0, 1]
    found = Schedule(problem, doubled).violations()
    assert [v.rule for v in found] == ["duplicate", "missing"]
    assert str(found[1].tasks[0]) == "actor[0] F0 on device 0"

    foreign = order.copy()
    foreign[0, 0], foreign[1, 2] = order[1, 2], order[0, 0]
    assert {v.rule for v in Schedule(problem, foreign).violations()} == {"foreign", "missing"}

    stuck = rows(problem, ("aF0 cB0 cF0 aF1 aB0 cF1 cB1 aB1", GOOD[1]))
    (violation,) = stuck.violations()
    assert violation.rule == "deadlock"
    assert Task(0, "critic", 0, "B", 0) in violation.tasks
    with pytest.raises(ScheduleError, match="critic\\[0\\] B0 on device 0 waits for"):
        stuck.check()
    with pytest.raises(ScheduleError, match="deadlock"):
        stuck.makespan()


def test_memory_cap_names_the_first_task_above_it():
    (violation,) = rows(tiny(memory_cap=2.4), GOOD).violations()
    assert violation.rule == "memory"
    assert violation.tasks == (Task(0, "critic", 0, "F", 0),)
    assert rows(tiny(memory_cap=2.5), GOOD).violations() == []


def test_csv_round_trip_and_exact_columns():
    schedule = rows(tiny(), GOOD)
    text = schedule.to_csv()
    lines = text.splitlines()
    assert lines[0] == "device,position,model,replica,kind,micro_batch,start,end"
    assert lines[1] == "0,0,actor,0,F,0,0,1"
    assert lines[6] == "0,5,critic,0,F,1,7,8"
    again = Schedule.from_csv(schedule.problem, text)
    assert (again.order == schedule.order).all()
    again = Schedule.from_json(schedule.to_json())
    assert again.problem == schedule.problem
    assert (again.order == schedule.order).all()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("device,position", "position,device", "columns"),
        ("0,0,actor,0,F,0,0,1", "0,0,actor,0,F,9,0,1", "not a task"),
        ("0,0,actor,0,F,0,0,1", "0,0,actor,0,F,0,0", "7 cells"),
        ("0,0,actor,0,F,0,0,1", "0,x,actor,0,F,0,0,1", "line 2"),
        ("0,0,actor,0,F,0,0,1", "7,0,actor,0,F,0,0,1", "device 7"),
        ("0,0,actor,0,F,0,0,1", "0,1,actor,0,F,0,0,1", "position 1"),
        ("0,0,actor,0,F,0,0,1\n", "", "position 1"),
        ("0,7,actor,0,B,1,9,11\n", "", "missing: actor\\[0\\] B1 on device 0"),
    ],
)
def test_bad_csv_is_named(old, new, words):
    text = rows(tiny(), GOOD).to_csv()
    assert old in text
    with pytest.raises(CsvError, match=words):
        Schedule.from_csv(tiny(), text.replace(old, new))
