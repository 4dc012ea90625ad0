"""The whole loop on a tiny run: files it leaves, lr = 0, control, resume, kill -9, compilation."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from fuse_jax.config_read import ConfigError, default_config
from fuse_jax.training.checkpoint import CheckpointError, Checkpoints
from fuse_jax.training.metrics import read_lines
from fuse_jax.training.run import report_text, train
from fuse_jax.training.state import GivenUp

ROOT = Path(__file__).resolve().parents[2]


def tiny() -> ConfigDict:
    """Seconds, not minutes: two of everything."""
    config = default_config()
    model = config.model
    model.vocab_size, model.hidden_size, model.intermediate_size = 72, 16, 24
    model.num_layers, model.head_dim = 1, 8
    config.rollout.max_prompt_length = 3
    config.rollout.slots = config.rollout.prefill_rows = 8
    config.compute.sequence_buckets = "16,40"
    config.compute.micro_batch_tokens = config.compute.scoring_tokens = 320
    config.sft.steps, config.sft.rows = 4, 8
    config.reward_training.steps, config.reward_training.rows = 4, 8
    config.reward_training.max_pairs = 32
    config.ppo.iterations, config.ppo.prompts_per_iteration = 4, 16
    config.ppo.minibatches = 2
    config.ppo.critic_warmup = 1
    config.evaluation.prompts, config.evaluation.every = 16, 2
    config.checkpoint.every = 1
    config.mesh.data = 1
    config.data.limit = 400
    return config


def numbers(workdir: Path) -> list[dict]:
    """metrics.jsonl without what is time."""
    rows = read_lines(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def parameters(workdir: Path) -> dict[str, bytes]:
    """Bytes of every exported weight file."""
    return {
        str(path.relative_to(workdir)): path.read_bytes()
        for path in sorted((workdir / "models").rglob("*.safetensors"))
    }


def by_function() -> ConfigDict:
    """Shorter: one iteration, scored by a function, in sequences of one length."""
    config = tiny()
    config.stages = "sft,ppo"
    config.reward.source, config.critic.init = "function", "actor"
    config.compute.sequence_buckets = "40"
    config.ppo.iterations = 1
    return config


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run, what it printed, and for each save of PPO whether the best it names was there."""
    workdir = tmp_path_factory.mktemp("run") / "undisturbed"
    save, named = Checkpoints.save, []

    def watch(self, step, arrays, host):
        if "progress" in host:  # a kill may come as soon as this save is finished
            best = host["progress"]["best_iteration"]
            named.append((workdir / "checkpoints" / "best" / str(best)).is_dir())
        save(self, step, arrays, host)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(Checkpoints, "save", watch)
        report = train(tiny(), workdir)
    return workdir, report, said.getvalue(), named


@pytest.fixture(scope="module")
def undisturbed(watched):
    return watched[:2]


def test_what_a_run_leaves(undisturbed):
    workdir, report = undisturbed
    stored = json.loads((workdir / "report.json").read_text())
    for name in ("gold", "greedy", "reward"):
        assert {f"{name}_before", f"{name}_after"} <= stored.keys()
    assert stored["iterations"] == 4
    assert {"sft", "reward_model", "rollout", "scoring", "update"} <= stored["seconds"].keys()
    assert (workdir / "report.png").stat().st_size > 10_000
    assert list((workdir / "tensorboard").iterdir())
    assert "gold, sampled" in report_text(report)
    rows = read_lines(workdir / "samples.jsonl")
    assert {"prompt", "response", "score", "step"} <= rows[0].keys()
    steps = [row["step"] for row in read_lines(workdir / "metrics.jsonl") if row["stage"] == "ppo"]
    assert steps == [0, 1, 2, 3]
    evaluated = [r["step"] for r in read_lines(workdir / "metrics.jsonl") if r["stage"] == "eval"]
    assert evaluated == [0, 2, 4]
    for name in ("sft", "reward_model", "actor", "critic", "best_actor"):
        assert (workdir / "models" / name / "config.json").exists()


def test_every_prompt_of_an_epoch_is_asked_once(undisturbed):
    workdir, _ = undisturbed
    prompts = [
        row["prompt"] for row in read_lines(workdir / "samples.jsonl") if row["stage"] == "ppo"
    ]
    assert len(prompts) == len(set(prompts))


def test_sampler_and_trainer_agree(undisturbed):
    workdir, _ = undisturbed
    first = next(row for row in numbers(workdir) if row["stage"] == "ppo")
    assert first["log_prob_drift_max"] < 1e-5


def late_compilations(printed: str) -> list[str]:
    assert "shape: generate 8 rows" in printed
    return [line for line in printed.splitlines() if "had to compile" in line]


def test_late_compilations_are_named(watched):
    """The first update of the actor comes after the critic's warm-up."""
    late = late_compilations(watched[2])
    assert any("iteration 1 had to compile" in line and "ppo_step" in line for line in late)


def test_a_second_run_that_precompiles_is_bit_equal_and_compiles_nothing_late(
    undisturbed, tmp_path, capsys
):
    """Without: `test_resume_is_bit_equal_from_every_iteration`, which runs the whole again."""
    workdir, _ = undisturbed
    config = tiny()
    config.compute.precompile = True
    train(config, tmp_path / "again")
    assert not late_compilations(capsys.readouterr().out)
    assert numbers(tmp_path / "again") == numbers(workdir)
    assert parameters(tmp_path / "again") == parameters(workdir)


class Killed(BaseException):
    """Stands for the end of the process."""


SLOW = pytest.mark.slow  # one in the middle stands for them by default


@pytest.mark.parametrize("stop_after", [*(pytest.param(i, marks=SLOW) for i in (0, 1, 3)), 2])
def test_resume_is_bit_equal_from_every_iteration(undisturbed, tmp_path, monkeypatch, stop_after):
    from fuse_jax.training import ppo_loop

    workdir, _ = undisturbed
    iterate = ppo_loop.iterate

    def dying(run, parts, state):
        if state.progress.iteration == stop_after:
            raise Killed
        return iterate(run, parts, state)

    monkeypatch.setattr(ppo_loop, "iterate", dying)
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "run")
    monkeypatch.setattr(ppo_loop, "iterate", iterate)
    train(tiny(), tmp_path / "run", resume=True)
    assert numbers(tmp_path / "run") == numbers(workdir)
    assert parameters(tmp_path / "run") == parameters(workdir)


def test_the_best_is_on_disk_before_a_save_that_names_it(watched):
    assert watched[3] == [True] * 5


def test_resume_of_a_finished_run_changes_nothing(undisturbed):
    workdir, report = undisturbed
    before = numbers(workdir), parameters(workdir)
    again = train(tiny(), workdir, resume=True)
    assert (numbers(workdir), parameters(workdir)) == before
    assert again["gold_after"] == report["gold_after"]


def test_another_run_is_not_overwritten(undisturbed):
    workdir, _ = undisturbed
    with pytest.raises(ConfigError, match="--resume"):
        train(tiny(), workdir)
    changed = tiny()
    changed.ppo.gamma = 0.5
    with pytest.raises(ConfigError, match=r"ppo.gamma=0.5.*1.0"):
        train(changed, workdir, resume=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.max_prompt_length", 2),  # the task's prompts are longer
        ("model.max_position", 38),  # and answers of 36 tokens follow
        ("model.vocab_size", 20),
    ],
)
def test_a_run_refused_after_reading_its_data_claims_no_directory(tmp_path, key, value):
    config = tiny()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=key):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_stage_that_only_skips_updates_is_given_up(tmp_path, monkeypatch, stage):
    from fuse_jax.training import state

    monkeypatch.setattr(state.optax.tree, "norm", lambda tree: jax.numpy.float32(np.nan))
    config = tiny()
    config.ppo.max_skipped_updates = 3 if stage == "sft" else 4
    config.ppo.minibatches = 8
    with pytest.raises(GivenUp, match=r"ppo.max_skipped_updates"):
        train(config, tmp_path)
    stages = {row["stage"] for row in read_lines(tmp_path / "metrics.jsonl")}
    assert stages == (set() if stage == "sft" else {"sft", "reward_model", "eval", "ppo"})


def without_learning() -> ConfigDict:
    config = by_function()
    config.ppo.actor_optimizer.learning_rate = config.ppo.critic_optimizer.learning_rate = 0.0
    config.ppo.iterations, config.ppo.critic_warmup = 2, 0
    return config


def length_reward(prompt: str, response: str, meta: dict) -> float:
    return float(len(response))


@pytest.mark.filterwarnings("ignore:the reward function runs in this process")
def test_learning_rate_zero_changes_no_bit(tmp_path):
    config = without_learning()
    config.rollout.temperature = 0.7
    train(config, tmp_path, reward_function=length_reward)
    exported = parameters(tmp_path)
    assert exported["models/actor/model.safetensors"] == exported["models/sft/model.safetensors"]
    for row in (row for row in numbers(tmp_path) if row["stage"] == "ppo"):
        assert abs(row["ratio_max"] - 1) < 1e-5
        assert row["log_ratio_abs_max"] < 1e-5
        assert abs(row["kl"]) < 1e-4


@pytest.mark.filterwarnings("ignore:the reward function runs in this process")
@pytest.mark.parametrize(
    ("sampling", "dtype", "ratio", "drift"),
    [
        ({"top_k": 20, "top_p": 0.9, "temperature": 0.7}, "float32", 1e-5, np.inf),
        pytest.param({"temperature": 1.3}, "bfloat16", 0.1, 0.1, marks=pytest.mark.slow),
    ],
)
def test_learning_rate_zero_keeps_every_ratio_at_one(tmp_path, sampling, dtype, ratio, drift):
    """Cut sampling: against recomputed log-probs, exactly. bfloat16 promises closeness only."""
    config = without_learning()
    config.ppo.recompute_log_probs = dtype == "float32"
    config.rollout.update(sampling)
    config.compute.dtype = dtype
    train(config, tmp_path, reward_function=length_reward)
    row = next(row for row in numbers(tmp_path) if row["stage"] == "ppo")
    assert abs(row["ratio_max"] - 1) < ratio and row["log_ratio_abs_max"] < ratio
    assert row["log_prob_drift_max"] < drift
    assert (row["log_prob_drift_max"] > 0.01) == (dtype == "float32")  # a cut moves log-probs


def test_stages_run_alone_from_exported_directories(undisturbed, tmp_path):
    workdir, report = undisturbed
    config = tiny()
    config.stages = "ppo"
    config.actor.path = str(workdir / "models" / "sft")
    config.reward_model.path = str(workdir / "models" / "reward_model")
    alone = train(config, tmp_path)
    assert alone["gold_before"] == report["gold_before"]
    assert alone["reward_after"] == pytest.approx(report["reward_after"], abs=1e-5)


def excluding_reward(prompt: str, response: str, meta: dict) -> float:
    """Scores even lengths, fails on the rest."""
    if len(response.split()) % 2:
        raise RuntimeError("odd")
    return float(len(response.split()))


@pytest.mark.filterwarnings("ignore:the reward function runs in this process")
def test_failed_rewards_are_counted_and_shown(tmp_path, capsys, caplog):
    config = by_function()
    report = train(config, tmp_path, reward_function=excluding_reward)
    row = next(row for row in numbers(tmp_path) if row["stage"] == "ppo")
    assert 0 < row["excluded"] < 16
    assert report["excluded"] == row["excluded"]
    assert "RuntimeError: odd" in caplog.text
    assert "samples excluded (exception" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "function", "key"),
    [
        ({"source": "model"}, excluding_reward, "reward.source"),
        ({"source": "function", "function": "a.b:c"}, excluding_reward, "reward.function"),
        ({"source": "function", "function": "fuse_jax.nothing:here"}, None, "reward.function"),
        ({"source": "function", "function": "fuse_jax.data.gsm8k:rewrad"}, None, "reward'"),
    ],
)
def test_a_reward_function_that_cannot_run_is_refused_at_start(tmp_path, settings, function, key):
    config = tiny()
    config.reward.update(settings)
    with pytest.raises(ConfigError, match=key):
        train(config, tmp_path / "run", reward_function=function)
    assert not (tmp_path / "run").exists()


def broken_reward(prompt: str, response: str, meta: dict) -> float:
    """Never works."""
    raise RuntimeError("boom")


@pytest.mark.filterwarnings("ignore:the reward function runs in this process")
def test_a_run_whose_every_sample_is_excluded_is_given_up(tmp_path):
    config = by_function()
    with pytest.raises(GivenUp, match="every sample was excluded"):
        train(config, tmp_path, reward_function=broken_reward)
    assert [row["excluded"] for row in numbers(tmp_path) if row["stage"] == "ppo"] == [16.0]


def test_damaged_files_of_a_run_are_refused_by_name(tmp_path, undisturbed):
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed[0], workdir)
    newest = workdir / "checkpoints" / "ppo" / "4"
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, 100)
    with pytest.raises(CheckpointError, match=r"ppo/4: damaged .* resume from save 3"):
        train(tiny(), workdir, resume=True)
    (workdir / "config.json").write_text('{"seed": ')
    with pytest.raises(ConfigError, match=r"config.json: unreadable"):
        train(tiny(), workdir, resume=True)


@pytest.mark.slow
def test_shuffled_control_keeps_the_scores_and_moves_them(tmp_path, undisturbed):
    config = tiny()
    config.reward.control = "shuffled"
    config.ppo.iterations = 1
    train(config, tmp_path)
    plain = next(row for row in numbers(undisturbed[0]) if row["stage"] == "ppo")
    shuffled = next(row for row in numbers(tmp_path) if row["stage"] == "ppo")
    assert shuffled["score"] == plain["score"]
    assert shuffled["reward"] == pytest.approx(plain["reward"], abs=1e-6)
    assert shuffled["return_mean"] != plain["return_mean"]


@pytest.mark.filterwarnings("ignore:the reward function runs in this process")
def test_kl_blow_up_stops_the_run_and_keeps_the_best(tmp_path):
    config = by_function()
    config.ppo.iterations, config.ppo.critic_warmup = 4, 0
    config.ppo.kl.stop_above = 1e-12
    config.ppo.actor_optimizer.learning_rate = 0.05
    report = train(config, tmp_path, reward_function=length_reward)
    assert "ppo.kl.stop_above" in report["stopped"]
    assert report["iterations"] < 4
    assert (tmp_path / "models" / "best_actor").is_dir()


LAUNCHER = """
import sys
sys.path.insert(0, {here!r})
from test_run import tiny, train
train(tiny(), {workdir!r}, resume=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_kill_9_at_ten_random_moments(undisturbed, tmp_path, seed):
    workdir, report = undisturbed
    span = 0.3 * report["seconds"]["this_process"]  # so that kills come first on any machine
    script = LAUNCHER.format(here=str(Path(__file__).parent), workdir=str(tmp_path / "run"))
    command = [sys.executable, "-c", script]
    log = (tmp_path / "log").open("w+")  # of all processes: shown where one fails
    quiet = {"stdout": log, "stderr": log}
    started = time.monotonic()
    subprocess.run([*command[:2], "import fuse_jax.training.run"], check=True)
    imports = time.monotonic() - started
    rng = np.random.default_rng(seed)
    kills = 0
    while kills < 10:
        process = subprocess.Popen(command, **quiet)
        try:
            code = process.wait(timeout=imports + rng.uniform(0, span))
            assert code == 0, (tmp_path / "log").read_text()[-2000:]
            break  # it finished between two kills
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    assert kills >= 3
    subprocess.run(command, check=True, **quiet)
    assert numbers(tmp_path / "run") == numbers(workdir)
    assert parameters(tmp_path / "run") == parameters(workdir)


@pytest.mark.slow  # the step's own mesh tests hold gradients and loss to 1e-5
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2)])
def test_meshes_agree_with_one_device(undisturbed, tmp_path, mesh):
    workdir, _ = undisturbed
    config = tiny()
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = mesh
    train(config, tmp_path)
    one = [row for row in numbers(workdir) if row["stage"] in ("ppo", "eval")]
    many = [row for row in numbers(tmp_path) if row["stage"] in ("ppo", "eval")]
    for a, b in zip(one, many, strict=True):
        for name in ("score", "kl", "length_mean", "gold", "critic_loss"):
            if name in a:
                assert b[name] == pytest.approx(a[name], abs=1e-4), (name, a["step"])
