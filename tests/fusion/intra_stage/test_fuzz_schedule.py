"""The package against the independent judge (tests/oracle/check_schedule.py) on generated problems.

Each problem draws stages (N <= 8), micro-batches (M <= 16), fusion factors, chunks and placement,
directions, split backward, lag, extras, tails, unequal lengths (zeros among them) and caps. Each is
scheduled at random, run through CSV and JSON, and broken in several ways; validity, offenders,
every start and end, the makespan, the memory of each device: all must be equal, to the tick.
"""

import json
import math
import random
import re

import check_schedule as judge
import numpy as np
import pytest
from random_schedules import broken_orders, draw_orders, draw_problem, rows_of

from fuse_jax.fusion.intra_stage import problem as errors
from fuse_jax.fusion.intra_stage.problem import MODELS, Problem, ProblemError
from fuse_jax.fusion.intra_stage.schedule import CsvError, Schedule, ScheduleError, Task

TICKS, QUANTA = judge.TICKS, judge.QUANTA
SAME_RULE = {
    "missing": "task",
    "duplicate": "task",
    "foreign": "task",
    "order": "order",
    "deadlock": "deadlock",
    "memory": "memory",
}


# -- comparing


def ids_of(graph):
    """{judge's key: task id of the package}."""
    names = zip(*(getattr(graph, f).tolist() for f in _KEY_FIELDS))
    return {
        (MODELS[model], replica, stage, "FBW"[kind], m): task
        for task, (model, replica, stage, kind, m) in enumerate(names)
    }


_KEY_FIELDS = ("model", "replica", "stage", "kind", "micro_batch")


def key_of(problem, task):
    stage = judge.stage_on(problem[task.model], task.replica, task.chunk, task.device)
    return (task.model, task.replica, stage, task.kind, task.micro_batch)


def compare(plain, orders):
    """Assert that package and judge say the same of one schedule; returns the judge's verdict."""
    plain = judge.normalised(plain)
    problem = Problem.from_dict(plain)
    graph = Schedule(problem, np.zeros((0, 0), np.int64)).graph
    ids = ids_of(graph)
    schedule = Schedule(problem, np.array([[ids[key] for key in row] for row in orders], np.int64))
    verdict = judge.check(plain, orders)
    found = schedule.violations()
    rules = {SAME_RULE[violation.rule] for violation in found}
    if "deadlock" in verdict.kinds():
        rules.discard("memory")  # without times the judge follows no memory
    assert rules == verdict.kinds(), (found, verdict.faults)
    for rule in rules:
        theirs = {key_of(plain, v.tasks[-1]) for v in found if SAME_RULE[v.rule] == rule}
        if rule == "deadlock":
            theirs = {key_of(plain, t) for v in found if v.rule == rule for t in v.tasks}
        assert theirs == {key for kind, _, key in verdict.faults if kind == rule}, rule
    if "task" in rules or "deadlock" in rules:
        with pytest.raises(ScheduleError):
            schedule.check()
        return verdict
    compare_numbers(schedule, ids, verdict)
    return verdict


def compare_numbers(schedule, ids, verdict):
    """Times to the tick, memory to the quantum."""
    timing = schedule.timing()
    assert {key: int(timing.start[i]) for key, i in ids.items()} == verdict.start
    assert {key: int(timing.end[i]) for key, i in ids.items()} == verdict.end
    assert timing.makespan == verdict.makespan
    assert schedule.makespan() == verdict.makespan / TICKS
    assert schedule.memory_profile().tolist() == verdict.running
    assert (schedule.peaks() * QUANTA).round().tolist() == verdict.peaks
    assert schedule.peak_memory == verdict.peak / QUANTA


def compare_text(plain, orders, tmp_path):
    """What is written is read back by both sides, and the judge finds the written times right."""
    problem = Problem.from_dict(plain)
    rows = [[Task(*cells) for cells in row] for row in rows_of(plain, orders)]
    schedule = Schedule.from_tasks(problem, rows)
    (tmp_path / "s.csv").write_text(schedule.to_csv())
    (tmp_path / "s.json").write_text(schedule.to_json())
    read, times = judge.read_schedule(str(tmp_path / "s.csv"), plain)
    assert read == orders
    assert judge.check(plain, read, times).kinds() <= {"memory"}
    assert judge.read_schedule(str(tmp_path / "s.json"), plain)[0] == orders
    again = Schedule.from_csv(problem, schedule.to_csv())
    assert (again.order == schedule.order).all()
    both = Schedule.from_json(schedule.to_json())
    assert (both.order == schedule.order).all() and both.problem == problem
    assert Problem.from_json(problem.to_json()).digest == problem.digest
    assert json.loads(schedule.to_json())["makespan"] == schedule.makespan()


def with_cap(rng, plain, verdict):
    """The problem with a cap near this schedule's peak; None if that is below one micro-batch."""
    cap = verdict.peak / QUANTA * rng.choice([0.5, 0.8, 0.999, 1.0, 1.1])
    capped = {**plain, "memory_cap": cap}
    try:
        Problem.from_dict(capped)
    except ProblemError as error:
        assert isinstance(error, errors.MemoryCapError), error
        return None
    return capped


def judge_one(seed, tmp_path):
    """One generated problem: a random schedule, the same under a cap, and broken ones."""
    rng = random.Random(seed)
    plain = draw_problem(rng)
    orders = draw_orders(rng, plain)
    counts = {"valid": 1}
    verdict = compare(plain, orders)
    assert verdict.valid, verdict.faults
    if seed % 4 == 0:
        compare_text(plain, orders, tmp_path)
    capped = with_cap(rng, plain, verdict)
    for trial in range(3):
        subject = capped if capped and trial != 1 else plain
        verdict = compare(subject, orders if capped and trial == 0 else broken_orders(rng, orders))
        for kind in verdict.kinds() or {"valid"}:
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def judge_range(seeds, tmp_path):
    totals: dict[str, int] = {}
    for seed in seeds:
        try:
            counts = judge_one(seed, tmp_path)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for kind, count in counts.items():
            totals[kind] = totals.get(kind, 0) + count
    return totals


def test_package_and_judge_agree(tmp_path):
    totals = judge_range(range(200), tmp_path)
    # The comparison means little unless every kind of fault really occurred.
    assert min(totals.get(kind, 0) for kind in set(SAME_RULE.values())) >= 20, totals
    assert totals["valid"] >= 250, totals


@pytest.mark.slow
def test_package_and_judge_agree_on_2000(tmp_path):
    totals = judge_range(range(10_000, 12_000), tmp_path)
    assert min(totals.get(kind, 0) for kind in set(SAME_RULE.values())) >= 200, totals
    print(totals)


# -- bad input: the error's class, and the key it must name


def _set(path, value):
    """Break a problem at a dotted path."""

    def break_it(plain):
        *parents, last = path.split(".")
        part = plain
        for key in parents:
            part = part[key]
        part[last] = value

    return break_it


BAD_PROBLEMS = {
    "no such key": (_set("actor.stage", 2), errors.UnknownKeyError, "stage"),
    "no such top key": (_set("cap", 2), errors.UnknownKeyError, "cap"),
    "no critic": (lambda plain: plain.pop("critic"), errors.UnknownKeyError, "critic"),
    "no forward": (lambda p: p["actor"].pop("forward"), errors.UnknownKeyError, "forward"),
    "a model that is a list": (_set("critic", [1]), errors.UnknownKeyError, "critic"),
    "no stage": (_set("actor.stages", 0), errors.CountError, "stages"),
    "half a micro-batch": (_set("critic.micro_batches", 2.5), errors.CountError, "micro_batches"),
    "chunks as a flag": (_set("actor.chunks", True), errors.CountError, "chunks"),
    "devices as text": (_set("devices", "8"), errors.CountError, "devices"),
    "not a multiple": (_set("devices", 7), errors.DivisibilityError, "devices=7"),
    "negative time": (_set("actor.forward", -1.0), errors.TimeError, "forward"),
    "time that is no number": (_set("actor.backward", "x"), errors.TimeError, "backward"),
    "times for 3 stages": (_set("critic.backward", [1, 2, 3]), errors.TimeError, "backward"),
    "infinite lag": (_set("actor.lag", math.inf), errors.TimeError, "lag"),
    "tail that is not a number": (_set("actor.tail", math.nan), errors.TimeError, "tail"),
    "extras of four": (_set("actor.last_extra", [1, 1, 1, 1]), errors.TimeError, "last_extra"),
    "negative activation": (_set("critic.activation", -1), errors.ActivationError, "activation"),
    "lengths of 3": (_set("actor.lengths", [1, 1, 1]), errors.LengthsError, "lengths"),
    "lengths of 5 replicas": (
        _set("critic.lengths", [[1] * 4] * 5),
        errors.LengthsError,
        "replica",
    ),
    "negative length": (_set("actor.lengths", [1, 1, 1, -1]), errors.LengthsError, "lengths"),
    "sideways": (_set("actor.direction", "left"), errors.LayoutError, "direction"),
    "unknown placement": (_set("critic.placement", "zigzag"), errors.LayoutError, "placement"),
    "cap below one": (_set("memory_cap", 0.5), errors.MemoryCapError, "memory_cap"),
    "cap that is text": (_set("memory_cap", "1"), errors.MemoryCapError, "memory_cap"),
}


def small_problem():
    actor = {"stages": 4, "micro_batches": 4, "forward": 1, "backward": 2, "activation": 1.0}
    return {"actor": actor, "critic": {**actor, "stages": 2}}


@pytest.mark.parametrize("case", BAD_PROBLEMS)
def test_bad_problem_gets_its_named_error(case):
    break_it, error, named = BAD_PROBLEMS[case]
    plain = small_problem()
    Problem.from_dict(plain)
    break_it(plain)
    with pytest.raises(error, match=re.escape(named)) as caught:
        Problem.from_dict(plain)
    assert type(caught.value) is error


def _line(number, text):
    def break_it(lines):
        lines[number] = text

    return break_it


BAD_CSV = {
    "columns": (_line(0, "device,model"), "columns"),
    "cells": (_line(3, "0,2,actor,0,F,2"), "line 4"),
    "a word for a number": (_line(3, "0,two,actor,0,F,2,0,0"), "line 4"),
    "device": (_line(3, "9,2,actor,0,F,2,0,0"), "device 9"),
    "position": (_line(3, "0,7,actor,0,F,2,0,0"), "position 7"),
    "model": (_line(3, "0,2,reward,0,F,2,0,0"), "reward"),
    "kind": (_line(3, "0,2,actor,0,W,2,0,0"), "W2"),
    "replica": (_line(3, "0,2,actor,3,F,2,0,0"), "actor[3]"),
    "micro-batch": (_line(3, "0,2,actor,0,F,9,0,0"), "F9"),
    "a row too few": (lambda lines: lines.pop(), "device 3"),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_bad_csv_gets_its_named_error(case):
    problem = Problem.from_dict(small_problem())
    orders = draw_orders(random.Random(0), small_problem())
    names = [[Task(*cells) for cells in row] for row in rows_of(small_problem(), orders)]
    lines = Schedule.from_tasks(problem, names).to_csv().splitlines()
    break_it, named = BAD_CSV[case]
    break_it(lines)
    with pytest.raises(CsvError, match=re.escape(named)):
        Schedule.from_csv(problem, "\n".join(lines) + "\n")
