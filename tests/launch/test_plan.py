"""`python launch/plan.py schedule`: figures, files, overrides, and errors that name the key."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

ROOT = Path(__file__).resolve().parents[2]
JUDGE = ROOT / "tests" / "oracle" / "check_schedule.py"
EXAMPLES = sorted((ROOT / "configs" / "schedules").glob("*.json"))
SMALL = str(ROOT / "configs" / "schedules" / "small.json")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plan = load(ROOT / "launch" / "plan.py")


@pytest.fixture(autouse=True)
def no_plans_of_others(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSE_JAX_PLANS", str(tmp_path / "plans"))


def run(*arguments):
    return plan.main(["schedule", *map(str, arguments)])


def test_small_problem_gives_figures_and_files_that_the_judge_accepts(tmp_path, capsys):
    assert run("--problem", SMALL, "--out", tmp_path) == 0
    said = capsys.readouterr().out
    # 2 M (f + b) + (N/2 - 1)(f + b) = 27 against (M + N - 1)(f + b) = 21 for each model alone.
    assert "27 ms" in said and "proven optimal" in said and "42 ms" in said and "1.556x" in said
    figures = json.loads((tmp_path / "report.json").read_text())
    assert (figures["makespan"], figures["bound"], figures["serial_makespan"]) == (27, 27, 42)
    assert figures["proven_optimal"] is True and figures["stopped_by"] == "bound"
    assert figures["bubble"] == pytest.approx(1 - 24 / 27)
    for name in ("gantt.png", "comparison.png"):
        assert imread(tmp_path / name).shape[0] > 300
    for name in ("schedule.csv", "schedule.json"):
        verdict = subprocess.run(
            [sys.executable, JUDGE, SMALL, tmp_path / name], capture_output=True, text=True
        )
        assert verdict.returncode == 0, verdict.stdout + verdict.stderr
        assert "makespan 27 ms" in verdict.stdout
    header = (tmp_path / "schedule.csv").read_text().splitlines()[0]
    assert header == "device,position,model,replica,kind,micro_batch,start,end"
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == figures["tasks"] == 64


def test_overrides_change_the_problem_and_the_schedule_can_be_planned_again(tmp_path):
    overrides = ["--problem.actor.micro_batches=6", "--problem.critic.weight_grad", "[1,1,1,1]"]
    overrides += ["--problem.memory_cap=6", "--problem.critic.direction=up", "--problem.devices=8"]
    assert run("--problem", SMALL, "--out", tmp_path / "a", "--time_limit=2", *overrides) == 0
    problem = json.loads((tmp_path / "a" / "schedule.json").read_text())["problem"]
    assert problem["actor"]["micro_batches"] == 6 and problem["memory_cap"] == 6
    assert problem["critic"]["weight_grad"] == [1, 1, 1, 1]
    assert problem["critic"]["direction"] == "up" and problem["devices"] == 8
    assert json.loads((tmp_path / "a" / "report.json").read_text())["peak_memory"] <= 6
    # A schedule's file holds its problem: it is a problem file too.
    again = ["--problem", tmp_path / "a" / "schedule.json", "--problem.memory_cap=null"]
    assert run(*again, "--time_limit=2", "--out", tmp_path / "b") == 0
    content = json.loads((tmp_path / "b" / "schedule.json").read_text())
    assert content["problem"] == {**problem, "memory_cap": None}


def test_a_plan_is_searched_once(tmp_path, capsys):
    arguments = ["--problem", SMALL, "--plans", tmp_path / "kept", "--out"]
    assert run(*arguments, tmp_path / "a") == 0 and "not searched" not in capsys.readouterr().out
    assert run(*arguments, tmp_path / "b") == 0 and "not searched" in capsys.readouterr().out
    same = [(tmp_path / name / "schedule.csv").read_text() for name in "ab"]
    assert same[0] == same[1]
    assert run(*arguments, tmp_path / "c", "--seed=1") == 0
    assert "not searched" not in capsys.readouterr().out


def test_memory_pass_and_cost_model(tmp_path, capsys):
    arguments = ["--problem", SMALL, "--problem.actor.micro_batches=8", "--time_limit=3", "--out"]
    arguments += [tmp_path, "--evaluations=3000"]
    assert run(*arguments) == 0
    before = json.loads((tmp_path / "report.json").read_text())
    assert run(*arguments, "--memory_evaluations=3000") == 0
    after = json.loads((tmp_path / "report.json").read_text())
    assert after["makespan"] == before["makespan"]
    assert after["peak_memory"] < before["peak_memory"]
    assert run(*arguments, "--cost_model=lockstep") == 0
    figures = json.loads((tmp_path / "report.json").read_text())
    assert figures["cost_model"] == "lockstep" and figures["makespan"] > before["makespan"]
    with pytest.raises(SystemExit):
        run(*arguments, "--cost_model=lockstep", "--memory_evaluations=9")
    assert "--cost_model=ideal only" in capsys.readouterr().err


def test_python_problem_files(tmp_path):
    (tmp_path / "p.py").write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config():\n"
        "    model = dict(stages=2, micro_batches=2, forward=1, backward=2)\n"
        "    return ConfigDict(dict(actor=model, critic=model))\n"
    )
    assert run("--problem", tmp_path / "p.py", "--out", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["makespan"] == 12


BAD = {
    "no file": (["--problem", "nowhere.json"], "nowhere.json: no such file"),
    "no JSON": (["--problem", __file__.replace(".py", ".txt")], "no such file"),
    "model": (["--problem.acter.lag=1"], "problem.acter.lag: must start with actor or critic"),
    "model's key": (["--problem.actor.lagg=1"], "no key 'actor.lagg'; known keys: actor.stages"),
    "top key": (["--problem.cap=1"], "no key 'cap'; known keys: devices, memory_cap"),
    "deep key": (["--problem.actor.forward.0=1"], "no key 'actor.forward.0'"),
    "value": (["--problem.actor.lag=fast"], "TimeError: actor: lag='fast'"),
    "stages": (["--problem.devices=6"], "DivisibilityError: devices=6"),
    "cap": (["--problem.memory_cap=0.5"], "MemoryCapError: memory_cap=0.5"),
    "cap of each": (["--problem.memory_cap=[4]"], "memory_cap=[4]: give one number"),
    "caps": (["--problem.memory_cap=[9,9]"], "memory_cap=[9, 9]: give one number"),
    "lengths": (['--problem.actor.lengths={"a":1}'], "lengths={'a': 1}: give [M] or [K, M]"),
    "huge": (["--problem.actor.forward=" + "9" * 400], "must be a finite number"),
    "budget": (["--evaluations=-5"], "evaluations=-5: give a whole number from 1"),
    "pass": (["--memory_evaluations=-1"], "memory_evaluations=-1: give a whole number from 0"),
    "seed": (["--seed=-1"], "seed=-1: give a whole number from 0"),
    "time": (["--time_limit=nan"], "time_limit=nan: give CPU seconds above 0"),
    "no time": (["--time_limit=-1"], "time_limit=-1.0: give CPU seconds above 0"),
    "transport": (["--cost_model=carrier_pigeon"], "TransportError: cost_model='carrier_pigeon'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case, tmp_path, capsys):
    arguments, named = BAD[case]
    first = [] if "--problem" in arguments else ["--problem", SMALL]
    assert run(*first, *arguments, "--out", tmp_path / "out") == 2
    said = capsys.readouterr()
    assert named in said.err and not said.out
    assert not list((tmp_path / "out").glob("*"))


def test_an_unwritable_directory_is_refused_before_the_search(tmp_path, capsys, monkeypatch):
    def never(*_, **__):
        raise AssertionError("searched")

    monkeypatch.setattr("fuse_jax.fusion.intra_stage.plans.search", never)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert run("--problem", SMALL, "--out", out) == 2
        assert f"--out={out}: " in capsys.readouterr().err


def test_a_plan_that_cannot_be_kept_is_still_given(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run("--problem", SMALL, "--out", tmp_path, "--plans", tmp_path / "file" / "below") == 0
    assert "27 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, named",
    [
        ('{"order": 1, "problem": 3}', "must hold an object with keys actor, critic"),
        ("{", "is not JSON: Expecting property name"),
        ("[1]", "must hold an object with keys actor, critic"),
        ('{"actor": {}, "critic": {}}', "actor needs the key 'stages'"),
    ],
)
def test_bad_files_are_refused_by_name(text, named, tmp_path, capsys):
    (tmp_path / "p.json").write_text(text)
    assert run("--problem", tmp_path / "p.json") == 2
    assert named in capsys.readouterr().err


def test_a_python_file_that_raises_is_refused(tmp_path, capsys):
    (tmp_path / "p.py").write_text("def get_config():\n    return 1 / 0\n")
    assert run("--problem", tmp_path / "p.py") == 2
    assert "p.py raises ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_a_python_file_without_get_config_is_refused(tmp_path, capsys):
    (tmp_path / "p.py").write_text("x = 1\n")
    assert run("--problem", tmp_path / "p.py") == 2
    assert "define get_config()" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--problm.actor.lag=1"], ["--problem.memory_cap"], ["extra"]])
def test_unknown_flags_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--problem", SMALL, *words)
    assert stop.value.code == 2
    assert f"not understood: {words[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_problem(path):
    from fuse_jax.fusion.intra_stage.problem_file import load_problem

    assert load_problem(path).name


def test_command_line_imports_no_jax(tmp_path):
    code = (
        "import sys, plan; code = plan.main(sys.argv[1:]); sys.exit(code or 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "schedule", "--problem", SMALL, "--out", tmp_path],
        cwd=ROOT / "launch", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
