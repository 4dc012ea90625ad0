"""The baselines against closed forms and against the figures published with RLHFuse's artifact."""

import pytest

from fuse_jax.benchmarks.schedule import authors_problem, llama_pipeline, llama_problem
from fuse_jax.fusion.intra_stage import baselines
from fuse_jax.fusion.intra_stage.authors import (
    authors_annealing,
    authors_greedy,
    authors_memory_annealing,
)
from fuse_jax.fusion.intra_stage.problem import Pipeline, Problem

# serial 1F1B, greedy, greedy's peak, concatenated 1F1B (actor first, critic first)
PUBLISHED = (
    (813, 741, 42.90, 801, 798),
    (477, 425, 33.30, 465, 462),
    (309, 239, 23.60, 297, 294),
    (819, 755, 42.90, 805, 791),
    (483, 419, 31.25, 469, 455),
    (315, 225, 23.60, 301, 287),
    (708, 632, 75.44, 694, 694),
    (420, 366, 58.48, 406, 406),
    (276, 214, 42.24, 262, 262),
    (711, 651, 75.44, 696, 681),
    (423, 363, 52.48, 408, 393),
    (279, 219, 41.24, 264, 249),
)


@pytest.mark.parametrize("index", range(12))
def test_published_figures(index):
    problem = authors_problem(index)
    serial, greedy, peak, actor_first, critic_first = PUBLISHED[index]
    assert baselines.serial_1f1b(problem).makespan == serial
    found = authors_greedy(problem).check()
    assert (found.makespan(), found.peak_memory) == (greedy, peak)
    assert baselines.concatenated_1f1b(problem, "actor").check().makespan() == actor_first
    assert baselines.concatenated_1f1b(problem, "critic").check().makespan() == critic_first
    same = baselines.concatenated_1f1b(problem, "actor", "same").check()
    assert same.makespan() == serial  # in one direction nothing is gained
    assert same.problem.critic.direction == "up"


def test_one_model_alone_is_the_classic_1f1b():
    """(M + N - 1)(f + b), and stage s holds N - s micro-batches."""
    pipeline = Pipeline(4, 7, 3, 5, 1)
    run = baselines.alone(Problem(pipeline, pipeline), 0).check()
    assert run.makespan() == (7 + 3) * 8
    assert run.peaks().tolist() == [4, 3, 2, 1]
    down = Problem(pipeline, Pipeline(4, 7, 3, 5, 1, direction="down"))
    assert baselines.alone(down, 1).check().peaks().tolist() == [1, 2, 3, 4]
    serial = baselines.serial_1f1b(down)
    assert (serial.makespan, serial.peak_memory) == (160, 4)


def test_interleaved_row_matches_its_formula():
    for chunks in (2, 3):
        pipeline = Pipeline(4, 8, 2, 4, 1, chunks=chunks)
        run = baselines.alone(Problem(pipeline, pipeline), 0).check()
        joined = Pipeline(4, 8, 2 * chunks, 4 * chunks, 1)
        assert run.makespan() == baselines.interleaved_ms(joined, chunks)


def test_formulas_by_hand():
    pipeline = Pipeline(4, 8, 3, 6, 1)
    assert baselines.gpipe_ms(pipeline) == 99
    assert baselines.interleaved_ms(pipeline, 2) == (8 + 1.5) * 9
    assert baselines.zb_h1_ms(pipeline) == 8 * 9 + 3 * 3
    split = Pipeline(4, 8, 3, 4, 1, weight_grad=2)
    assert baselines.zb_h1_ms(split) == 8 * 9 + 3 * 5
    with pytest.raises(ValueError, match="multiple"):
        baselines.interleaved_ms(Pipeline(4, 7, 3, 6), 2)
    with pytest.raises(ValueError, match="equal stages"):
        baselines.gpipe_ms(Pipeline(2, 7, (3, 4), 6))


def test_speed_ups_of_the_formulas_on_llama():
    """schedule tables of the literature: interleaved v=2, v=4 and ZB-H1 over serial 1F1B, 33B and
    65B.
    """
    models = llama_pipeline("33B", 1), llama_pipeline("65B", 1)
    serial = baselines.serial_1f1b(llama_problem("33B", "65B", 1)).makespan
    for value, known in (
        (sum(baselines.interleaved_ms(m, 2) for m in models), 1.314),
        (sum(baselines.interleaved_ms(m, 4) for m in models), 1.559),
        (sum(map(baselines.zb_h1_ms, models)), 1.468),
    ):
        assert serial / value == pytest.approx(known, abs=6e-4)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_every_baseline_is_valid_for_split_and_chunked_problems(split, chunks):
    problem = llama_problem("13B", "33B", 1, split=split, chunks=chunks)
    for schedule in (*baselines.fused_baselines(problem), authors_greedy(problem)):
        schedule.check()
    plain = baselines.serial_1f1b(llama_problem("13B", "33B", 1))
    joined = baselines.serial_1f1b(problem)
    assert joined.makespan == pytest.approx(plain.makespan, rel=0.01)
    assert joined.peak_memory == plain.peak_memory


def test_chimera_like_keeps_each_models_1f1b_limit():
    problem = llama_problem("33B", "33B", 1)
    schedule = baselines.chimera_like(problem).check()
    assert schedule.peak_memory <= 2 * 9.75
    assert schedule.makespan() < baselines.concatenated_1f1b(problem).makespan()


def test_latency_annealing_keeps_the_rules_and_never_gets_worse():
    problem = authors_problem(2)
    start = authors_greedy(problem)
    run = authors_annealing(start, evaluations=300_000, hot=3.0, cold=0.003, target=225, seed=1)
    assert run.schedule.check().makespan() == 225  # the lower bound, from 239
    assert run.evaluations < 300_000
    again = authors_annealing(start, evaluations=300_000, hot=3.0, cold=0.003, target=225, seed=1)
    assert (again.schedule.order == run.schedule.order).all()


def test_memory_annealing_lowers_the_peak_at_the_same_makespan():
    start = authors_greedy(authors_problem(5))
    run = authors_memory_annealing(start, evaluations=100_000, hot=20.0, cold=0.01, goal=15.6)
    assert run.schedule.check().makespan() <= start.makespan()
    assert run.schedule.peak_memory < start.peak_memory - 2
