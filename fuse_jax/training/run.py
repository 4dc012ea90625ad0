"""A whole run: its stages in order, and the report at the end."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fuse_jax.config import Config
from fuse_jax.config_read import ConfigError, read_config
from fuse_jax.data.packing import pack_demonstrations, pack_preferences
from fuse_jax.data.records import DataError
from fuse_jax.fusion.intra_stage.native import NativeError
from fuse_jax.fusion.output import OutputError
from fuse_jax.models.transformer import Params
from fuse_jax.training import models
from fuse_jax.training.checkpoint import CheckpointError
from fuse_jax.training.config_check import check_config, check_reward, count_devices
from fuse_jax.training.context import Role, Run, open_run
from fuse_jax.training.held_out_pairs import rank_held_out
from fuse_jax.training.metrics import read_lines
from fuse_jax.training.optimizers import make_optimizer
from fuse_jax.training.ppo_loop import PPOState, train_ppo
from fuse_jax.training.ppo_parts import build_parts
from fuse_jax.training.report import write_report
from fuse_jax.training.reward_model import make_reward_step
from fuse_jax.training.sft import make_sft_step
from fuse_jax.training.state import GivenUp, create_state
from fuse_jax.training.supervised import Stage, run_stage

Report = dict[str, Any]
# Errors whose message is all that a user needs: what is wrong, and the fix.
REFUSALS = (ConfigError, DataError, CheckpointError, GivenUp, NativeError, OutputError)


def train(
    settings: ConfigDict,
    workdir: Path | str,
    *,
    resume: bool = False,
    reward_function: Callable[[str, str, dict], float] | None = None,
) -> Report:
    """Run the stages of `settings` in `workdir`; returns what report.json holds.

    `reward_function(prompt, response, meta)`, e.g. of a notebook, is used with
    `reward.source=function` in the place of `reward.function`, which is left empty; it runs in this
    process.

    Raises:
      ConfigError: a setting that cannot run, before anything loads.
    """
    config = read_config(settings)
    if reward_function is not None:
        config = with_function(config, reward_function)
    check_config(config, device_count=count_devices(config))
    if reward_function is None and config.reward.source == "function" and "ppo" in config.stages:
        check_reward(config.reward.function)
    started = time.monotonic()
    run = open_run(config, Path(workdir), resume=resume, say=partial(print, flush=True))
    report: Report = {"seed": config.seed, "seconds": {}}
    actor = models.initial_actor(run)
    if "sft" in config.stages:
        actor = run_sft(run, actor, report)
    reward_model = None
    if "reward_model" in config.stages:
        reward_model = run_reward_model(run, actor, report)
    elif config.reward_model.path:
        reward_model = models.initial_reward_model(run, actor)
    if "ppo" in config.stages:
        run_ppo(run, actor, reward_model, report, reward_function)
    run.log.close()
    report["seconds"]["this_process"] = round(time.monotonic() - started, 1)
    report["peak_rss_bytes"] = peak_rss_bytes()
    write_report(run.workdir, report)
    return report


def with_function(config: Config, function: Callable[[str, str, dict], float]) -> Config:
    """`config` with the name of `function`, which a resumed run is then held to."""
    reward = config.reward
    if reward.source != "function":
        raise ConfigError(
            f"reward.source={reward.source!r}: a reward function was given: set it to 'function'"
        )
    name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
    if reward.function not in ("", name):
        raise ConfigError(
            f"reward.function={reward.function!r}: a reward function was given too: leave one out"
        )
    return replace(config, reward=replace(reward, function=name))


def run_sft(run: Run, actor: Params, report: Report) -> Params:
    """Supervised warm start of the actor, exported to models/sft."""
    config, arch = run.config, run.archs["actor"]
    optimizer = make_optimizer(config.sft.optimizer, config.sft.steps)
    state = create_state({"actor": actor}, {"actor": optimizer}, {"actor": arch}, run.mesh)
    stage = Stage(
        name="sft",
        items=run.task.demonstrations,
        steps=config.sft.steps,
        pack=partial(
            pack_demonstrations,
            rows=config.sft.rows,
            row_length=config.sft.row_length,
            pad_token_id=run.task.vocabulary.pad_token_id,
        ),
        step=make_sft_step(
            run.mesh,
            arch,
            config.compute,
            optimizer,
            valid_vocab=run.task.vocabulary.vocab_size,
        ),
    )
    state, report["seconds"]["sft"] = run_stage(run, stage, state)
    export(run, "actor", state.params["actor"], "sft")
    return state.params["actor"]


def run_reward_model(run: Run, actor: Params, report: Report) -> Params:
    """Bradley-Terry training of the reward model, exported to models/reward_model."""
    config, arch = run.config.reward_training, run.archs["reward_model"]
    optimizer = make_optimizer(config.optimizer, config.steps)
    params = {"reward_model": models.initial_reward_model(run, actor)}
    state = create_state(params, {"reward_model": optimizer}, {"reward_model": arch}, run.mesh)
    pack = partial(
        pack_preferences,
        rows=config.rows,
        row_length=config.row_length,
        max_pairs=config.max_pairs,
        pad_token_id=run.task.vocabulary.pad_token_id,
    )
    step = make_reward_step(run.mesh, arch, run.config.compute, optimizer, score_l2=config.score_l2)
    stage = Stage("reward_model", run.task.preferences, config.steps, pack, step)
    state, report["seconds"]["reward_model"] = run_stage(run, stage, state)
    trained = state.params["reward_model"]
    if len(run.task.eval_preferences):
        report |= rank_held_out(run, trained)
        run.say(
            f"reward model: {report['reward_model_accuracy']:.3f} of "
            f"{len(run.task.eval_preferences)} held-out pairs ranked rightly, "
            f"AUC {report['reward_model_auc']:.3f}"
        )
    export(run, "reward_model", trained, "reward_model")
    return trained


def run_ppo(
    run: Run,
    actor: Params,
    reward_model: Params | None,
    report: Report,
    reward_function: Callable[[str, str, dict], float] | None,
) -> None:
    """PPO from the actor; exports models/actor, models/critic and the best actor."""
    parts, train_state, moments = build_parts(run, actor, reward_model, reward_function)
    with parts:
        state = train_ppo(run, parts, train_state, moments)
    export(run, "actor", state.train.params["actor"], "actor")
    export(run, "critic", state.train.params["critic"], "critic")
    export_best(run, state)
    report |= ppo_report(run, state, report)


def export_best(run: Run, state: PPOState) -> None:
    """The actor with the best held-out score, to models/best_actor."""
    best = run.checkpoints("best", keep=1)
    if best.latest() is not None:
        _, arrays, _ = best.restore({"actor": state.train.params["actor"]})
        export(run, "actor", arrays["actor"], "best_actor")
    best.close()


def export(run: Run, role: Role, params: Params, name: str) -> None:
    """Write `params` as an HF directory `models/<name>` of the work directory.

    In the dtype the run computes in. One that a killed run left is replaced.
    """
    directory = run.workdir / "models" / name
    if directory.exists():
        shutil.rmtree(directory)
    models.write(
        directory,
        role,
        run.archs[role],
        params,
        dtype=run.config.compute.dtype,
        vocabulary=run.task.vocabulary,
        tokenizer_path=run.task.tokenizer_path,
    )


def ppo_report(run: Run, state: PPOState, report: Report) -> Report:
    """Before and after on held-out prompts, KL, and what it cost."""
    lines = read_lines(run.workdir / "metrics.jsonl")
    held_out = [line for line in lines if line["stage"] == "eval"]
    iterations = [line for line in lines if line["stage"] == "ppo"]
    before, after = held_out[0], held_out[-1]
    progress = state.progress
    summary: Report = {
        "iterations": progress.iteration,
        "stopped": progress.stopped,
        "eval_prompts": int(after["prompts"]),
        "reward_before": before["score"],
        "reward_after": after["score"],
        "greedy_reward_before": before["greedy_score"],
        "greedy_reward_after": after["greedy_score"],
        "kl": _mean([line["kl"] for line in iterations[-10:]]),
        "kl_max": max((line["kl"] for line in iterations), default=0.0),
        "kl_bound": run.config.ppo.kl.stop_above,
        "best_iteration": progress.best_iteration,
        "excluded": progress.excluded,
        "early_stops": progress.early_stops,
        "skipped_updates": {name: int(n) for name, n in state.train.skipped.items()},
        "seconds": report["seconds"] | {k: round(v, 1) for k, v in progress.seconds.items()},
        "tokens_per_second": progress.generated_tokens / max(1e-9, progress.seconds["rollout"]),
    }
    if run.task.gold is not None:
        for name in ("gold", "greedy_gold", "auc"):
            short = name.replace("_gold", "")
            summary[f"{short}_before"], summary[f"{short}_after"] = before[name], after[name]
    return summary


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def peak_rss_bytes() -> int:
    """The most memory this process has held, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def report_text(report: Report) -> str:
    """The report in a few lines for a terminal."""
    lines = []

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def pair(label: str, name: str) -> None:
        if f"{name}_before" in report:
            before, after = report[f"{name}_before"], report[f"{name}_after"]
            lines.append(f"  {label:<30}{number(before)} -> {number(after)}")

    if "reward_model_accuracy" in report:
        lines.append(f"  {'reward model, held-out pairs':<30}{report['reward_model_accuracy']:.3f}")
    pair("gold, sampled", "gold")
    pair("gold, greedy", "greedy")
    pair("reward, sampled", "reward")
    pair("reward, greedy", "greedy_reward")
    pair("AUC of reward for gold", "auc")
    if "kl" in report:
        lines.append(
            f"  {'KL, nats a response':<30}{report['kl']:.2f} (max {report['kl_max']:.2f})"
        )
        lines.append(f"  {'generated tokens/s':<30}{report['tokens_per_second']:.0f}")
    if report.get("stopped"):
        lines.append(f"  stopped: {report['stopped']}")
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in report["seconds"].items())
    lines.append(f"  {'seconds':<30}{seconds}")
    lines.append(f"  {'peak memory':<30}{report['peak_rss_bytes'] / 2**30:.2f} GiB")
    return "\n".join(["", "report", *lines])
