"""The search: known optima, caps, determinism, budgets, cost models, the memory pass, plans on
disk.
"""

import json
from dataclasses import replace

import pytest

from fuse_jax.benchmarks.schedule import authors_problem, llama_problem
from fuse_jax.fusion.intra_stage import plans, search_peak
from fuse_jax.fusion.intra_stage.baselines import fused_baselines, serial_1f1b
from fuse_jax.fusion.intra_stage.cost import COST_MODELS
from fuse_jax.fusion.intra_stage.graph import build_graph
from fuse_jax.fusion.intra_stage.problem import Pipeline, Problem
from fuse_jax.fusion.intra_stage.schedule import Schedule, ScheduleError
from fuse_jax.fusion.intra_stage.search import Meter, search, sequential_order
from fuse_jax.fusion.intra_stage.search_peak import lower_peak
from fuse_jax.fusion.output import OutputError

AUTHORS_BOUNDS = (708, 372, 225, 702, 366, 225, 618, 330, 186, 606, 318, 186)


@pytest.mark.parametrize("index", range(12))
def test_all_published_configurations_at_their_bound(index):
    found = search(authors_problem(index), evaluations=20_000)
    assert found.makespan == found.bound == AUTHORS_BOUNDS[index]
    assert found.proven_optimal
    assert found.stopped_by == "bound"
    assert found.schedule.violations() == []


def test_large_equal_models_are_solved_by_the_portfolio():
    found = search(llama_problem("65B", "65B", 2, stages=32), evaluations=100)
    assert found.proven_optimal


@pytest.mark.parametrize("split", [False, True])
def test_equal_models_at_serial_memory(split):
    """Unsplit exactly 1.5 x serial at M = N; split at the uncapped bound, >= 1.74 x."""
    problem = llama_problem("33B", "33B", 1, cap=1.0, split=split)
    found = search(problem, evaluations=20_000)
    assert found.proven_optimal
    speed = serial_1f1b(problem).makespan / found.makespan
    assert speed == 1.5 if not split else speed >= 1.74
    assert found.peak_memory <= problem.memory_cap


def test_virtual_stages_with_split_backward():
    problem = llama_problem("33B", "33B", 1, cap=1.0, split=True, chunks=2)
    found = search(problem, evaluations=50_000)
    assert found.schedule.check().problem.memory_cap == 9.75
    assert serial_1f1b(problem).makespan / found.makespan >= 1.76


def test_a_cap_below_one_micro_batch_of_each_still_gives_a_schedule():
    model = Pipeline(2, 3, 1, 2, 1.0)
    problem = Problem(model, replace(model, direction="down"), memory_cap=1.0)
    found = search(problem, evaluations=2_000)
    assert found.peak_memory == 1.0
    order = sequential_order(build_graph(problem))
    assert found.makespan <= Schedule(problem, order).check().makespan()


def test_same_seed_and_budget_give_the_same_schedule_and_budgets_hold():
    problem = llama_problem("33B", "65B", 1, cap=1.0)
    one, two = (search(problem, evaluations=3_000) for _ in range(2))
    assert (one.schedule.order == two.schedule.order).all()
    assert one.stopped_by == "budget"
    assert not one.proven_optimal
    assert 3_000 <= one.evaluations < 3_600
    longer = search(problem, evaluations=9_000)
    assert longer.makespan <= one.makespan


def test_a_time_limit_is_said():
    found = search(llama_problem("33B", "65B", 1, cap=1.0), evaluations=10**9, time_limit=0.05)
    assert found.stopped_by == "time"
    found.schedule.check()


@pytest.mark.parametrize("cost_model", COST_MODELS[1:])
def test_blocking_transports_are_searched_under_their_own_cost(cost_model):
    actor = Pipeline(4, 8, 5, 10, 1.0)
    problem = Problem(actor, Pipeline(4, 8, 3, 6, 1.0, direction="down"))
    found = search(problem, cost_model=cost_model, evaluations=20_000)
    assert found.cost_model == cost_model
    assert found.makespan == found.schedule.check().makespan(cost_model)
    ideal = search(problem, evaluations=20_000).schedule
    for other in (ideal, *fused_baselines(problem)):
        assert found.makespan <= other.makespan(cost_model)
    assert found.makespan < ideal.makespan(cost_model)
    assert found.bound <= found.makespan


def test_a_blocking_search_keeps_the_cap():
    actor = Pipeline(4, 4, 5, 10, 1.0)
    problem = Problem(actor, Pipeline(4, 4, 3, 6, 1.0, direction="down"), memory_cap=3.0)
    found = search(problem, cost_model="rendezvous", evaluations=5_000)
    assert found.schedule.check().peak_memory <= 3.0


def test_memory_pass_reaches_the_proven_floor():
    for index, floor in ((2, 15.6), (5, 15.6)):
        found = search(authors_problem(index), evaluations=20_000)
        lower = lower_peak(found, evaluations=100_000)
        assert lower.makespan == lower.schedule.check().makespan() == found.makespan
        assert lower.peak_memory == lower.memory_bound == floor
        assert lower.stopped_by == "bound"


@pytest.mark.slow
def test_caps_and_peaks_that_need_seconds():
    """Unequal models at the serial peak, at their bound; the lowest peak 16 devices can have."""
    assert search(llama_problem("33B", "65B", 1, cap=1.0), evaluations=500_000).proven_optimal
    assert search(llama_problem("13B", "33B", 2, cap=1.0), evaluations=3_000_000).proven_optimal
    found = search(authors_problem(8), evaluations=20_000)
    lower = lower_peak(found, evaluations=2_000_000)
    assert lower.makespan == 186 and lower.peak_memory == lower.memory_bound == 26.24


def test_memory_pass_is_deterministic_and_never_raises_the_peak():
    found = search(authors_problem(1), evaluations=20_000)
    one, two = (lower_peak(found, evaluations=30_000) for _ in range(2))
    assert (one.schedule.order == two.schedule.order).all()
    assert one.peak_memory < found.peak_memory / 1.5
    assert one.memory_bound <= one.peak_memory


def test_plans_are_read_back_and_checked(tmp_path):
    problem = authors_problem(2)
    first, cached = plans.find_plan(problem, evaluations=20_000, directory=tmp_path)
    again, hit = plans.find_plan(
        replace(problem, name="another"), evaluations=20_000, directory=tmp_path
    )
    assert (cached, hit) == (False, True)
    assert (again.schedule.order == first.schedule.order).all()
    assert again.makespan == first.makespan
    assert again.proven_optimal
    _, hit = plans.find_plan(problem, evaluations=20_001, directory=tmp_path)
    assert not hit

    for path in tmp_path.iterdir():
        plain = json.loads(path.read_text())
        plain["makespan"] = 224.0
        path.write_text(json.dumps(plain))
    with pytest.raises(ScheduleError, match="delete it"):
        plans.find_plan(problem, evaluations=20_000, directory=tmp_path)


SPOILT = {
    "null": lambda plain: None,
    "number": lambda plain: 3,
    "claim": lambda plain: {**plain, "bound": plain["makespan"] + 1, "proven_optimal": True},
    "text": lambda plain: {**plain, "bound": "x"},
    "count": lambda plain: {**plain, "evaluations": "x"},
    "peak": lambda plain: {**plain, "peak_memory": 0.0},
    "key": lambda plain: {key: plain[key] for key in plain if key != "order" and key != "bound"},
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_plan_is_refused_and_its_file_named(case, tmp_path):
    problem = llama_problem("13B", "13B", 1)
    plans.find_plan(problem, evaluations=20_000, directory=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(SPOILT[case](json.loads(path.read_text()))))
    with pytest.raises(ScheduleError, match=f"{path.name} is no valid plan .*: delete it"):
        plans.find_plan(problem, evaluations=20_000, directory=tmp_path)


def test_plans_cut_short_by_time_are_not_kept(tmp_path):
    problem = llama_problem("33B", "65B", 1, cap=1.0)
    found, _ = plans.find_plan(problem, time_limit=0.02, directory=tmp_path)
    assert found.stopped_by == "time"
    assert list(tmp_path.iterdir()) == []


def test_a_plan_the_clock_had_a_part_in_is_not_kept_whatever_stopped_it(tmp_path, monkeypatch):
    whole = Meter(1e9, 60.0)
    part = Meter(1e6, 0.0, Meter(1e6, None, whole))
    assert part.stop == "time" and whole.clocked and whole.stop == ""
    whole = Meter(1e12, 1e-3)
    assert whole.grant(1e9) == 1e9 and not whole.clocked  # no rate is known yet
    whole.spend(1.0)
    assert whole.grant(1e9) < 1e9 and whole.clocked
    assert not Meter(1e12, None).clocked

    problem = llama_problem("13B", "13B", 1)
    ended = replace(search(problem, evaluations=20_000), clocked=True)
    assert ended.stopped_by == "bound"
    monkeypatch.setattr(plans, "search", lambda *_, **__: ended)
    plans.find_plan(problem, time_limit=60.0, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_long_cooling_leaves_most_of_a_small_budget(monkeypatch):
    problem, budget = authors_problem(1), 100_000
    rounds = []
    cool = search_peak.lower_memory

    def noted(*arguments):
        peak, used = cool(*arguments)
        rounds.append(used)
        return peak, used

    monkeypatch.setattr(search_peak, "lower_memory", noted)
    lower_peak(search(problem), evaluations=budget)
    assert len(rounds) > 1
    assert rounds[0] < budget * len(build_graph(problem).duration) / 4


EDGES = {
    "one model": Problem(Pipeline(4, 6, 2, 3, 1), Pipeline(4, 0, 1, 1, 1, direction="down")),
    "other model": Problem(Pipeline(4, 0, 2, 3, 1), Pipeline(2, 3, 1, 1, 1, direction="down")),
    "one device": Problem(Pipeline(1, 2, 2, 3, 1), Pipeline(1, 3, 1, 1, 1)),
    "no memory": Problem(Pipeline(2, 2, 2, 3), Pipeline(2, 3, 1, 1, direction="down")),
    "empty micro-batches": Problem(
        Pipeline(2, 3, 2, 3, 1, lengths=(1, 0, 2)), Pipeline(4, 3, 1, 1, 1, lengths=(0, 0, 0))
    ),
    "no time": Problem(Pipeline(2, 3, 0, 0, 1), Pipeline(2, 3, 0, 0, 1)),
    "everything": Problem(
        Pipeline(3, 3, 2, 3, 1, weight_grad=1, chunks=3, tail=5, lag=0.5),
        Pipeline(2, 2, 1, 1, 1, chunks=2, placement="vee", direction="down"),
        memory_cap=4.0,
    ),
    "idle devices' share": Problem(Pipeline(2, 1, 2, 3, 1), Pipeline(2, 0, 1, 1), devices=6),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_are_searched_like_any_other(name):
    problem = EDGES[name]
    found = search(problem, evaluations=3_000)
    assert found.bound <= found.makespan == found.schedule.check().makespan()
    lower = lower_peak(found, evaluations=3_000)
    assert lower.memory_bound <= lower.peak_memory <= found.peak_memory
    blocked = search(problem, cost_model="rendezvous", evaluations=3_000)
    assert found.bound <= blocked.makespan == blocked.schedule.check().makespan("rendezvous")


def test_without_a_home_plans_ask_for_a_directory(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(plans.Path, "home", homeless)
    monkeypatch.delenv("FUSE_JAX_PLANS", raising=False)
    with pytest.raises(OutputError, match="FUSE_JAX_PLANS"):
        plans.default_directory()
    monkeypatch.setenv("FUSE_JAX_PLANS", "elsewhere")
    assert str(plans.default_directory()) == "elsewhere"


def test_a_directory_that_cannot_be_looked_into_holds_no_plan(tmp_path, monkeypatch, caplog):
    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    def no_directory(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(plans.Path, "exists", forbidden)
    monkeypatch.setattr(plans.Path, "mkdir", no_directory)
    problem = llama_problem("33B", "65B", 1)
    found, stored = plans.find_plan(problem, evaluations=500, directory=tmp_path)
    assert not stored and found.schedule.check()
    assert "FUSE_JAX_PLANS" in caplog.text
