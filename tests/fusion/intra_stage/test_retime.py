"""Labels that are corrected after a move are those of a schedule timed from nothing."""

import random

import numpy as np
import pytest
from random_schedules import draw_problem

from fuse_jax.benchmarks.schedule import authors_problem, llama_problem
from fuse_jax.fusion.intra_stage.cost import evaluate, time_order
from fuse_jax.fusion.intra_stage.graph import build_graph, reverse
from fuse_jax.fusion.intra_stage.heads import heads_and_tails
from fuse_jax.fusion.intra_stage.moves import move_task
from fuse_jax.fusion.intra_stage.problem import Problem
from fuse_jax.fusion.intra_stage.retime import (
    DEADLOCK,
    TOO_LONG,
    latest,
    may_fit,
    new_labels,
    undo_ends,
    update_afters,
    update_ends,
)
from fuse_jax.fusion.intra_stage.search import search, sequential_order

FAR = 10**12


def plain_afters(graph, order):
    """Longest way from each task's end to the end of the step, task by task."""
    back = reverse(graph)
    rows = np.ascontiguousarray(order[:, ::-1])
    after = {}

    def reckon(task, device, k):
        ways = [graph.tail[task]]
        if k + 1 < order.shape[1]:
            beside = order[device, k + 1]
            ways.append(after[beside] + graph.duration[beside])
        for later, lag in zip(graph.succ[task], graph.succ_lag[task]):
            if later >= 0:
                ways.append(lag + graph.duration[later] + after[later])
        after[task] = max(ways)

    begin, end = np.zeros_like(graph.duration), np.zeros_like(graph.duration)
    assert evaluate(back, rows, begin, end) >= 0
    place = {task: (d, k) for d, row in enumerate(order.tolist()) for k, task in enumerate(row)}
    # tasks of no time may share a label: repeat until all that a task waits for is known
    todo = sorted(place, key=lambda task: end[task])
    while todo:
        left = []
        for task in todo:
            device, k = place[task]
            needs = [order[device, k + 1]] if k + 1 < order.shape[1] else []
            needs += [later for later in graph.succ[task] if later >= 0]
            if all(need in after for need in needs):
                reckon(task, device, k)
            else:
                left.append(task)
        todo = left
    return np.array([after[task] for task in range(len(after))])


def walk_at_random(problem, order, rng, moves, limit):
    """Random moves, each compared with timing all; counts of (kept, too long, deadlock, guessed
    wrong).
    """
    graph = build_graph(problem)
    tail = heads_and_tails(graph)[1]
    labels = new_labels(graph, order)
    seen = [0, 0, 0, 0]
    for _ in range(moves):
        device, source = rng.randrange(order.shape[0]), rng.randrange(order.shape[1])
        to = min(max(source + rng.choice([-9, -3, -2, -1, 1, 2, 3, 9]), 0), order.shape[1] - 1)
        if to == source:
            continue
        low, high = min(source, to), max(source, to)
        before = labels.end.copy()
        move_task(graph, order, labels.position, device, source, to)
        guess = may_fit(graph, order, labels, device, low, high, limit)
        status, logged, _ = update_ends(graph, tail, order, labels, device, low, high, limit)
        timing = time_order(graph, order)
        too_long = timing is not None and timing.makespan > limit
        if timing is None:
            assert status in (DEADLOCK, TOO_LONG)
            seen[2] += 1
        elif too_long:
            # the tails are no exact ones: the end may be known only by looking
            assert status == TOO_LONG or latest(graph, order, labels.end) > limit
            seen[1] += 1
        else:
            assert status == 0
            assert (labels.end == timing.end).all()
            assert latest(graph, order, labels.end) == timing.makespan
            seen[3] += not guess
        if status == 0:
            update_afters(graph, tail, order, labels, device, low, high)
            assert (labels.after == plain_afters(graph, order)).all()
            seen[0] += 1
        if status < 0 or too_long:
            if status == 0:
                move_task(graph, order, labels.position, device, to, source)
                labels = new_labels(graph, order)
                continue
            undo_ends(labels, logged)
            move_task(graph, order, labels.position, device, to, source)
            assert (labels.end == before).all()
        assert not labels.queued.any()
    return seen


@pytest.mark.parametrize("loose", [1.0, 1.1, 1e6])
def test_labels_after_moves_on_a_published_problem(loose):
    problem = authors_problem(2)
    order = search(problem, evaluations=2_000).schedule.order.copy()
    limit = int(time_order(build_graph(problem), order).makespan * loose)
    kept, long_, stuck, wrong = walk_at_random(problem, order, random.Random(1), 300, limit)
    assert kept > 50 and wrong <= 3
    assert loose > 1e3 or long_ + stuck > 20


def test_labels_after_moves_with_a_split_backward_and_chunks():
    problem = llama_problem("13B", "33B", 1, split=True, chunks=2)
    order = search(problem, evaluations=20).schedule.order.copy()
    kept, _, stuck, _ = walk_at_random(problem, order, random.Random(2), 200, FAR)
    assert kept > 50 and stuck > 5


def test_labels_after_moves_on_generated_problems():
    """Tasks of no length among them, whose circles labels alone would not show."""
    sums = np.zeros(4, int)
    for seed in range(60):
        rng = random.Random(seed)
        problem = Problem.from_dict(draw_problem(rng))
        order = sequential_order(build_graph(problem))
        sums += walk_at_random(problem, order, rng, 25, FAR)
    assert sums[0] > 300 and sums[2] > 100, sums
