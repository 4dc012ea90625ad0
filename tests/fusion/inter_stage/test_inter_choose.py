"""How a plan is chosen, and what the command line makes of it."""

import argparse
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from fuse_jax.buckets import Bucket
from fuse_jax.fusion.inter_stage import choose as chooser
from fuse_jax.fusion.inter_stage import study
from fuse_jax.fusion.inter_stage.bound import ideal_bound
from fuse_jax.fusion.inter_stage.choose import (
    Predictor,
    choose,
    choose_with,
    draw_workloads,
    keeps,
    knee_keep,
    migrations,
    needs_refresh,
    thresholds,
)
from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable, Geometry
from fuse_jax.fusion.inter_stage.lengths import LengthHistory
from fuse_jax.fusion.inter_stage.plot import DECODE, MOVE, PREFILL, SCORES, plot_timeline
from fuse_jax.fusion.inter_stage.policy import POLICIES, SERIAL, Plan, admission
from fuse_jax.fusion.inter_stage.simulator import simulate
from fuse_jax.fusion.inter_stage.spans import Span
from fuse_jax.fusion.inter_stage.sweep import sweep
from fuse_jax.fusion.inter_stage.workload import Outcome, Workload

LAUNCHER = Path(__file__).resolve().parents[3] / "launch" / "simulate.py"
COLUMNS = ("ref_log_probs", "values", "scores")
SAMPLES, CAP = 64, 128
GEOMETRY = Geometry(4, 16, 8, 8, (Bucket(64, 8), Bucket(136, 4)), COLUMNS)
DECODE_TABLE = DecodeTable((1, 8, 16), (8, 136), ((8.0, 9.0), (9.0, 11.0), (12.0, 16.0)))
COSTS = Costs(DECODE_TABLE, {8: 15.0}, {column: [60.0, 60.0] for column in COLUMNS}, move_ms=10.0)


def lengths(count: int, seed: int, median: float = 30.0) -> LengthHistory:
    drawn = np.round(median * np.exp(np.random.default_rng(seed).standard_normal(count)))
    return LengthHistory(tuple(np.clip(drawn, 1, CAP).astype(int).tolist()))


HISTORY = lengths(512, 0)
PROMPTS = (8,) * SAMPLES


@pytest.fixture(scope="module")
def predict() -> Predictor:
    return Predictor(GEOMETRY, COSTS, draw_workloads(PROMPTS, HISTORY, CAP), HISTORY)


def test_the_paths_worth_trying():
    assert thresholds(3) == [1, 2]
    assert thresholds(1) == []
    assert thresholds(100) == [1, 2, 4, 6, 8, 10, 15, 20, 25, 30, 40, 50, 60, 75]
    assert keeps(1) == [] and keeps(4) == [1, 2, 3]
    assert keeps(64)[0] == 1 and keeps(64)[-1] == 51 and len(keeps(64)) <= 15
    plans = migrations(SAMPLES, GEOMETRY, COSTS)
    assert all(0 < plan.threshold <= plan.keep * 16 and plan.keep < 4 for plan in plans)


def test_the_knee_rule():
    # 8 live slots take 1.06 to 1.22 times as long as one; at 16 it is 1.65.
    costs = replace(COSTS, decode=DecodeTable((1, 8, 16), (8,), ((8.0,), (10.0,), (20.0,))))
    assert [knee_keep(count, GEOMETRY, costs) for count in (1, 8, 9, 16, 40)] == [1, 1, 2, 2, 4]
    flat = replace(COSTS, decode=DecodeTable((1,), (1,), ((8.0,),)))
    assert [knee_keep(count, GEOMETRY, flat) for count in (16, 17)] == [1, 2]  # slots
    plan = choose("knee", GEOMETRY, costs, PROMPTS, HISTORY, CAP, threshold=9)
    assert (plan.threshold, plan.keep) == (9, 2)


def test_a_knee_that_keeps_all_does_not_speak_of_migrating():
    # Two slots decode much slower than one: R_t = 9 samples want 9 instances.
    steep = replace(COSTS, decode=DecodeTable((1, 2), (8,), ((8.0,), (16.0,))))
    for history in (HISTORY, LengthHistory()):
        plan = choose("knee", GEOMETRY, steep, PROMPTS, history, CAP, threshold=9)
        assert not plan.threshold and not plan.keep and plan.handoff
        assert "migration to" not in plan.why


def test_a_fixed_threshold_beyond_saturation_is_lowered_by_name():
    steep = replace(COSTS, decode=DecodeTable((1, 3, 4), (8,), ((8.0,), (8.0,), (16.0,))))
    for history in (HISTORY, LengthHistory()):
        plan = choose("fixed", GEOMETRY, steep, PROMPTS, history, CAP, threshold=16, keep=2)
        assert (plan.threshold, plan.keep) == (6, 2)
        assert plan.why.startswith("threshold=16 ") and "R_t = 6" in plan.why
        fits = choose("fixed", GEOMETRY, steep, PROMPTS, history, CAP, threshold=6, keep=2)
        assert fits.threshold == 6 and "saturates" not in fits.why


def test_every_policy_fills_instances_until_decoding_saturates_and_no_more():
    room = 3
    steep = replace(COSTS, decode=DecodeTable((1, 3, 4), (8,), ((8.0,), (8.0,), (16.0,))))
    assert admission(steep, GEOMETRY) == room
    plans = migrations(SAMPLES, GEOMETRY, steep)
    assert plans and all(plan.threshold <= plan.keep * room for plan in plans)
    work = draw_workloads(PROMPTS, HISTORY, CAP, draws=1)[0]
    for policy in ("knee", "simulated", "fixed"):
        seen = simulate(Plan(policy, threshold=16, keep=2), GEOMETRY, steep, work, history=HISTORY)
        assert seen.migrated_at is not None
        assert (seen.finished_at > seen.migrated_at).sum() <= 2 * room


def test_large_iterations_are_planned_within_a_budget(monkeypatch):
    many = [64] * 10_000
    simulated = []

    def counted(plan, geometry, costs, workload, **options):
        simulated.append(len(workload.responses))
        return Outcome(total_ms=1000.0 - plan.threshold)

    monkeypatch.setattr(chooser, "simulate", counted)
    wide = replace(GEOMETRY, instances=64, slots=256)
    plan = choose("auto", wide, COSTS, many, HISTORY, CAP)
    assert plan.threshold and sum(simulated) <= 2 * chooser.BUDGET
    assert len(chooser.spaced(plans := migrations(100, GEOMETRY, COSTS), 9)) == 9
    assert chooser.spaced(plans, 9)[::8] == [plans[0], plans[-1]]


def test_simulated_is_as_good_as_trying_everything(predict):
    found = choose_with(predict, "simulated")
    everything = {plan: predict(plan) for plan in migrations(SAMPLES, GEOMETRY, COSTS)}
    least = min(*everything.values(), predict(Plan("hand-off")))
    assert found.predicted_ms is not None and found.serial_ms == predict(SERIAL)
    assert found.predicted_ms <= 1.01 * least
    assert found.predicted_ms == pytest.approx(
        np.mean([simulate(found, GEOMETRY, COSTS, w, history=HISTORY).total_ms
                 for w in predict.workloads])
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["simulated", "auto"])
def test_a_budget_leaves_the_pairs_of_the_knee_rule_in(predict, monkeypatch, policy):
    monkeypatch.setattr(chooser, "migrations", lambda *_, **__: [])
    knee, found = choose_with(predict, "knee"), choose_with(predict, policy)
    assert knee.predicted_ms < predict(Plan("hand-off"))
    assert found.policy == policy and found.predicted_ms <= knee.predicted_ms


def test_auto_takes_the_fastest_and_says_why(predict):
    others = {name: choose_with(predict, name) for name in ("knee", "simulated", "stream")}
    best = choose_with(predict, "auto")
    assert best.policy == "auto" and best.handoff
    assert best.predicted_ms == min(plan.predicted_ms for plan in others.values())
    assert "serial" in best.why and "ms predicted" in best.why


def test_auto_stays_serial_where_nothing_overlaps():
    """On one instance hand-off only cuts batches smaller."""
    one = replace(GEOMETRY, instances=1)
    plan = choose("auto", one, COSTS, PROMPTS[:8], HISTORY, CAP)
    assert not plan.handoff and plan.predicted_ms == plan.serial_ms
    assert plan.why.startswith("serial: nothing was predicted faster")
    assert choose("serial", one, COSTS, PROMPTS[:8], HISTORY, CAP).why == "asked for"


def test_plans_are_the_same_again_and_differ_by_seed():
    a, b = (choose("auto", GEOMETRY, COSTS, PROMPTS, HISTORY, CAP, seed=3) for _ in "ab")
    assert a == b
    c = choose("auto", GEOMETRY, COSTS, PROMPTS, HISTORY, CAP, seed=4)
    assert c.predicted_ms != a.predicted_ms


def test_longer_responses_change_the_prediction():
    short, long = (
        choose("auto", GEOMETRY, COSTS, PROMPTS, lengths(512, 1, median), CAP) for median in (5, 60)
    )
    assert short.predicted_ms < long.predicted_ms


@pytest.mark.parametrize("policy", POLICIES)
def test_before_any_length_is_known(policy):
    plan = choose(
        policy, GEOMETRY, COSTS, PROMPTS, LengthHistory(), CAP, threshold=13, keep=2, way="kv"
    )
    assert plan.predicted_ms is None
    assert plan.handoff is (policy != "serial")
    if policy in ("simulated", "auto", "stream", "serial"):
        assert plan.threshold == 0
    if policy == "fixed":
        assert (plan.threshold, plan.keep, plan.way) == (13, 2, "kv")
    if policy == "knee":
        plan = choose(policy, GEOMETRY, COSTS, PROMPTS, LengthHistory(), CAP)
        assert (plan.threshold, plan.keep) == (13, knee_keep(13, GEOMETRY, COSTS))  # 20 % of 64


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"policy": "best"}, "policy"),
        ({"threshold": -1}, "threshold"),
        ({"threshold": 5, "keep": 0}, "keep"),
        ({"threshold": 5, "keep": 4}, "keep"),
        ({"threshold": 33, "keep": 2}, "threshold"),
    ],
)
def test_what_cannot_be_is_refused_by_name(asked, name):
    asked = {"policy": "fixed", **asked}
    with pytest.raises(ValueError, match=name):
        choose(asked.pop("policy"), GEOMETRY, COSTS, PROMPTS, HISTORY, CAP, **asked)


def test_predicted_lengths_are_drawn_and_packed():
    """Where decoding costs the same for few and many, the long ones belong together."""
    predicted = [4.0] * 48 + [60.0] * 16
    work = draw_workloads(
        PROMPTS, HISTORY, CAP, predicted=predicted, ratios=(0.5, 1.5), draws=2, seed=1
    )
    assert {r for w in work for r in w.responses[:48]} == {2, 6}
    assert {r for w in work for r in w.responses[48:]} == {30, 90}
    assert work[0].predicted == tuple(predicted) and work[0].responses != work[1].responses
    (untrusted,) = draw_workloads(PROMPTS, HISTORY, CAP, predicted=predicted, draws=1)
    assert set(untrusted.responses) <= set(HISTORY.lengths)
    flat = replace(COSTS, decode=DecodeTable((1,), (1,), ((10.0,),)))
    asked = {"predicted": predicted, "ratios": (0.9, 1.1)}
    plan = choose("auto", GEOMETRY, flat, PROMPTS, HISTORY, CAP, **asked)
    assert plan.pack and "together" in plan.why
    steep = replace(COSTS, decode=DecodeTable((1, 16), (1,), ((2.0,), (40.0,))))
    assert not choose("auto", GEOMETRY, steep, PROMPTS, HISTORY, CAP, **asked).pack
    assert not choose("auto", GEOMETRY, flat, PROMPTS, HISTORY, CAP).pack


def test_refresh_when_lengths_drift():
    assert not needs_refresh(HISTORY, lengths(512, 7))
    assert needs_refresh(HISTORY, lengths(512, 7, 60.0))
    assert needs_refresh(LengthHistory(), HISTORY) and not needs_refresh(HISTORY, HISTORY)
    assert not needs_refresh(lengths(8, 1), lengths(8, 2, 45.0))  # so few that it may be chance


def test_the_bound_by_hand():
    geometry = Geometry(2, 4, 2, 2, (Bucket(16, 2),), ("a", "b"))
    costs = Costs(DecodeTable((1, 4), (1,), ((1.0,), (2.0,))), {4: 3.0}, {"a": [4.0], "b": [6.0]})
    # One long sample: prefill 3, nine steps of 1 ms, the dearer column.
    assert ideal_bound(geometry, costs, Workload((2, 2), (10, 1), 12)) == 3 + 9 + 6
    # Much work: per sample 3/2 of a prefill, 10/2 of scoring, three tokens at 2/4 ms each.
    assert ideal_bound(geometry, costs, Workload((2,) * 40, (4,) * 40, 12)) == 20 * (1.5 + 5 + 1.5)
    # A prefill cheaper than a step: one that moves may draw a token by it.
    cheap = replace(costs, prefill_ms={4: 0.25})
    assert ideal_bound(geometry, cheap, Workload((2, 2), (10, 1), 12)) == 0.25 + 8 + 0.25 + 6
    alone = replace(geometry, instances=1)
    assert ideal_bound(alone, cheap, Workload((2,), (10,), 12)) == 0.25 + 9 + 6


def test_the_sweep_holds_what_was_simulated(predict):
    found = sweep(predict, bound_ms=1.0)
    i, j = found.thresholds.index(16), found.keeps.index(2)
    assert found.ms[i, j] == predict(Plan("fixed", threshold=16, keep=2))
    assert np.isnan(found.ms[i, found.keeps.index(1)])  # 16 samples, but decoding saturates at 9
    threshold, keep, ms = found.best
    assert ms == min(np.nanmin(found.ms), found.handed_ms)
    assert not threshold or ms == predict(Plan("fixed", threshold=threshold, keep=keep))


# ------------------------------------------------------------------ pictures and command line


def shares(path) -> dict[str, float]:
    """Share of a picture's pixels in each colour that has a meaning."""
    pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    colors = {"prefill": PREFILL, "decode": DECODE, "move": MOVE, "a": SCORES[0], "b": SCORES[1]}
    return {
        name: float((pixels == [int(c[i : i + 2], 16) for i in (1, 3, 5)]).all(1).mean())
        for name, c in colors.items()
    }


def test_a_timeline_shows_every_kind(tmp_path):
    spans = [
        Span(0, "prefill", 0, 20, 2),
        Span(0, "decode", 20, 60, 4),
        Span(0, "move", 60, 70, 1, "kv"),
        Span(1, "score", 20, 60, 2, "first"),
        Span(1, "score", 60, 100, 2, "second"),
        Span(1, "weights", 0, 20),
    ]
    plot_timeline(spans, tmp_path / "t.png", instances=2, bound=90.0, marks=[(50.0, "R_t")])
    seen = shares(tmp_path / "t.png")
    assert seen["decode"] == pytest.approx(2 * seen["prefill"], rel=0.15)
    assert seen["a"] == pytest.approx(seen["b"], rel=0.15) and seen["a"] > 0.02
    assert seen["move"] == pytest.approx(seen["prefill"] / 2, rel=0.2)


def simulate_cli(*argv: str) -> int:
    """launch/simulate.py, as from the command line, in this process."""
    sys.argv = ["simulate.py", "inter-stage", *argv]
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(LAUNCHER), run_name="__main__")
    return end.value.code  # type: ignore[return-value]


SMALL = ("--instances=4", "--slots=4", "--samples=16", "--lengths=lognormal:12:48", "--draws=2")


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    out = str(tmp_path / "out")
    assert simulate_cli(*SMALL, "--sweep", "--weights-ms=30", f"--out={out}") == 0
    text = capsys.readouterr().out
    for word in ("serial", "hand-off", "knee", "simulated", "stream", "auto", "ideal bound", "m=3"):
        assert word in text
    assert imread(f"{out}/sweep.png").std() > 0.05 and imread(f"{out}/timeline.png").std() > 0.05
    file = tmp_path / "lengths.txt"
    file.write_text("3\n40\n7\n12\n")
    assert simulate_cli(f"--lengths={file}", "--policy=fixed", "--threshold=2", "--keep=1",
                        f"--out={out}") == 0  # fmt: skip
    assert "4 samples of lengths.txt (median 9.5)" in capsys.readouterr().out


def test_predictions_err_as_much_as_asked():
    parser = argparse.ArgumentParser()
    study.add_options(parser)
    exact, rough, none = (
        study.build(parser.parse_args([*SMALL, *options])).workloads[0]
        for options in (["--prediction-sigma=0"], ["--prediction-sigma=0.5"], [])
    )
    assert exact.predicted == exact.responses and none.predicted == ()
    errors = np.log(np.array(rough.predicted) / rough.responses)
    assert 0.25 < errors.std() < 1.0


def test_scoring_takes_the_share_asked_for():
    parser = argparse.ArgumentParser()
    study.add_options(parser)
    for share in (0.25, 2.0):
        asked = parser.parse_args([*SMALL, f"--scoring-share={share}"])
        built = study.build(asked)
        runs = [simulate(SERIAL, built.geometry, built.costs, w) for w in built.workloads]
        generation = sum(run.generation_ms for run in runs)
        assert sum(run.total_ms for run in runs) == pytest.approx((1 + share) * generation)


@pytest.mark.parametrize(
    "option",
    [
        "--instances=0",
        "--slots=-1",
        "--samples=0",
        "--lengths=lognormal:50",
        "--lengths=lognormal:-1:20",
        "--lengths=/nowhere",
        "--decode-ms=fast",
        "--decode-ms=1:5,1:6",
        "--decode-ms=0",
        "--scoring-share=0",
        "--move-ms=-1",
        "--prefill-ms=-2",
        "--scoring-tokens=0",
        "--prediction-sigma=-1",
        "--draws=0",
        "--threshold=99",
        "--keep=4",
    ],
)
def test_bad_options_are_named(option, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    fixed = ("--policy=fixed", "--threshold=2", "--keep=1", f"--out={tmp_path / 'out'}")
    assert simulate_cli(*SMALL, *fixed, option) == 2
    error = capsys.readouterr().err
    assert option.partition("=")[0] in error and len(error) > len(option) + 20
    assert not (tmp_path / "out").exists()


def test_a_sweep_of_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    for alone in ("--instances=1", "--samples=1"):
        assert simulate_cli(*SMALL, "--sweep", alone, f"--out={tmp_path / 'out'}") == 2
        assert "--sweep" in capsys.readouterr().err
        assert simulate_cli(*SMALL, alone, f"--out={tmp_path / 'out'}") == 0


def test_a_bad_file_of_lengths(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    file = tmp_path / "lengths.txt"
    for content in ("", "[]", "3 x", "0 1", "[1, [2]]"):
        file.write_text(content)
        assert simulate_cli(f"--lengths={file}") == 2
        assert "--lengths" in capsys.readouterr().err
