"""Whatever the search and the baselines return on generated problems, the judge confirms it.

The problems are wilder than real ones: stages and micro-batches without work, extras, lags, tails,
lengths of zero, chunks in both placements, several replicas, caps down to a single micro-batch.
"""

import random

import check_schedule as judge
import numpy as np
import pytest
from random_schedules import draw_orders, draw_problem

from fuse_jax.fusion.intra_stage.baselines import fused_baselines, serial_runs
from fuse_jax.fusion.intra_stage.bounds import makespan_bounds
from fuse_jax.fusion.intra_stage.problem import MODELS, MemoryCapError, Problem
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.intra_stage.search import search
from fuse_jax.fusion.intra_stage.search_peak import lower_peak


def orders_of(schedule):
    graph = schedule.graph
    return [
        [
            (
                MODELS[graph.model[task]], int(graph.replica[task]), int(graph.stage[task]),
                "FBW"[graph.kind[task]], int(graph.micro_batch[task]),
            )
            for task in row.tolist()
        ]
        for row in schedule.order
    ]  # fmt: skip


def confirmed(schedule: Schedule):
    """The judge's verdict, which must be that the schedule is valid."""
    verdict = judge.check(schedule.problem.to_dict(), orders_of(schedule))
    assert verdict.valid, verdict.faults
    return verdict


def capped(rng, plain, verdict):
    """Sometimes a cap from just above one micro-batch up to this schedule's peak."""
    low, high = 0.0, verdict.peak / judge.QUANTA
    if rng.random() < 0.4 or not high:
        return plain
    for share in (rng.choice([0.02, 0.1, 0.3, 0.6]), 0.7, 0.85, 1.0):
        problem = {**plain, "memory_cap": low + share * (high - low)}
        try:
            Problem.from_dict(problem)
        except MemoryCapError:
            continue
        return problem
    raise AssertionError("a valid schedule's peak must be a possible cap")


def judge_search(seed):
    rng = random.Random(seed)
    plain = draw_problem(rng)
    random_verdict = judge.check(plain, draw_orders(rng, plain))
    plain = capped(rng, plain, random_verdict)
    problem = Problem.from_dict(plain)
    found = search(problem, evaluations=60, seed=seed)
    verdict = confirmed(found.schedule)
    assert found.makespan == verdict.makespan / judge.TICKS
    assert found.peak_memory == verdict.peak / judge.QUANTA
    assert found.bound <= found.makespan
    assert found.proven_optimal == (found.bound == found.makespan)
    lower = lower_peak(found, evaluations=60, seed=seed)
    verdict = confirmed(lower.schedule)
    assert verdict.makespan / judge.TICKS <= found.makespan
    assert lower.peak_memory == verdict.peak / judge.QUANTA <= found.peak_memory
    assert lower.memory_bound is not None and lower.memory_bound <= lower.peak_memory
    # No valid schedule is under the bound, and a random one is hardly ever near it.
    if "memory_cap" not in plain:
        assert makespan_bounds(problem).makespan <= random_verdict.makespan
        for baseline in fused_baselines(problem):
            assert confirmed(baseline).makespan >= makespan_bounds(problem).makespan
    for run in serial_runs(problem):
        confirmed(run)
    return found.proven_optimal, "memory_cap" in plain


def judge_seeds(seeds):
    seen = []
    for seed in seeds:
        try:
            seen.append(judge_search(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return np.array(seen).mean(axis=0)


def test_the_judge_confirms_search_and_baselines():
    proven, with_cap = judge_seeds(range(60))
    assert proven > 0.3 and 0.3 < with_cap < 0.8, (proven, with_cap)


@pytest.mark.slow
def test_the_judge_confirms_search_and_baselines_on_1000():
    print(judge_seeds(range(20_000, 21_000)))
