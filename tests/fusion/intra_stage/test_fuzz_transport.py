"""Times under tick-locked transports against an independent reckoning, to the tick."""

import random

import check_transport
import pytest
from random_schedules import draw_orders, draw_problem, rows_of

from fuse_jax.fusion.intra_stage.cost import COST_MODELS, TransportError
from fuse_jax.fusion.intra_stage.problem import MODELS, Problem
from fuse_jax.fusion.intra_stage.schedule import Schedule, Task


@pytest.mark.parametrize("transport", [name for name in COST_MODELS if name != "ideal"])
def test_transport_times_agree(transport):
    refused = longer = 0
    for seed in range(40):
        rng = random.Random(1000 + seed)
        plain = draw_problem(rng)
        orders = draw_orders(rng, plain)
        rows = [[Task(*cells) for cells in row] for row in rows_of(plain, orders)]
        schedule = Schedule.from_tasks(Problem.from_dict(plain), rows)
        try:
            timing = schedule.timing(transport)
        except TransportError:
            assert transport == "neighbour" and schedule.problem.has_chunks
            refused += 1
            continue
        times, makespan = check_transport.times_under(plain, orders, transport)
        graph = schedule.graph
        for task in range(graph.duration.size):
            key = (
                MODELS[graph.model[task]], int(graph.replica[task]), int(graph.stage[task]),
                "FBW"[graph.kind[task]], int(graph.micro_batch[task]),
            )  # fmt: skip
            assert (timing.start[task], timing.end[task]) == times[key], (seed, key)
        assert timing.makespan == makespan, seed
        assert makespan >= schedule.timing().makespan
        longer += makespan > schedule.timing().makespan
    assert longer >= 10 and refused < 20, (longer, refused)
