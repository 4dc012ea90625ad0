"""Responses of a model of a Hugging Face directory to a file of prompts, and their scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fuse_jax.config import Config
from fuse_jax.config_read import ConfigError, read_config
from fuse_jax.data.countdown import Countdown
from fuse_jax.data.loading import load_prompts
from fuse_jax.data.tokenizer import load_tokenizer
from fuse_jax.placement.mesh import make_mesh
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Model
from fuse_jax.training import models
from fuse_jax.training.config_check import check_reward, check_settings, count_devices
from fuse_jax.training.context import (
    Run,
    architectures,
    check_cuts,
    check_score_head,
    unflatten,
)
from fuse_jax.training.evaluate import summary
from fuse_jax.training.generation import Generator
from fuse_jax.training.metrics import RunLog
from fuse_jax.training.ppo_parts import make_scorer, make_text_rewards, raw_scores
from fuse_jax.training.same_tokenizer import check_same_tokenizer
from fuse_jax.training.sample_table import log_samples
from fuse_jax.training.task import Task, tokenizer_path

STAGE = "evaluate"  # of the lines in samples.jsonl


def evaluate_files(
    settings: Mapping[str, Any],
    out: Path,
    *,
    greedy: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, float]:
    """Generate, score and write `samples.jsonl` and `summary.json` in `out`; returns the summary.

    settings: dotted keys of `Config`; generation and scoring read some of them. Scores come from
    `reward.function` if it is named, else from the model of `reward_model.path`; with neither,
    responses have none. `data.task=countdown` answers its held-out prompts and is judged by gold.

    Raises:
      ConfigError, DataError: what cannot run, before any weight is read.
    """
    config = read_config(unflatten({"stages": "", **settings}))
    check(config, out)
    archs = architectures(config)
    mesh = make_mesh(config.mesh)
    check_cuts(archs, mesh)
    check_score_head(config)
    task = build_prompts(config, say)
    check_same_tokenizer(config, task.vocabulary, tokenizer_path(config), say)
    run = Run(config, out, mesh, task, archs, RunLog(out), resume=False, say=say)
    actor = models.initial_actor(run)
    asked = [p for p in task.prompts for _ in range(config.evaluation.samples_per_prompt)]
    generator = Generator(run, greedy=greedy)
    samples, rollout = generator(actor, asked, np.arange(len(asked), dtype=np.int32))
    del actor  # its memory is the reward model's
    scores, valid = score(run, samples)
    log_samples(run, STAGE, 0, samples, scores)
    values = {"prompts": float(len(task.prompts)), **summary(samples, scores, valid, task.gold)}
    if valid.any():
        values |= {"score_min": float(scores[valid].min()), "score_max": float(scores[valid].max())}
    if not (config.reward.function or config.reward_model.path):
        for name in ("score", "excluded", "auc"):
            values.pop(name, None)
    values["tokens_per_second"] = rollout["tokens_per_second"]
    finite = {name: value if np.isfinite(value) else None for name, value in values.items()}
    (out / "summary.json").write_text(json.dumps(finite, indent=1) + "\n")
    return values


def check(config: Config, out: Path) -> None:
    """Refuse what cannot run. Raises ConfigError."""
    if (out / "samples.jsonl").exists():
        raise ConfigError(f"--out={out}: holds samples already: name another directory")
    if not config.actor.path:
        raise ConfigError("actor.path='': name the Hugging Face directory of the model (--model)")
    if config.data.task == "files" and not config.data.prompts:
        raise ConfigError("data.prompts='': name a file of prompts (--prompts)")
    if config.reward.function and config.reward_model.path:
        raise ConfigError(
            f"reward.function={config.reward.function!r}: scores come from it or from "
            "reward_model.path: give one of the two"
        )
    check_settings(config, device_count=count_devices(config))
    if config.reward.function:
        check_reward(config.reward.function)


def build_prompts(config: Config, say: Callable[[str], None]) -> Task:
    """The prompts to answer, as a Task."""
    limit = config.data.limit or None
    if config.data.task == "countdown":
        task = Countdown()
        return Task(task, prompts=task.held_out_prompts()[:limit], gold=task.gold)
    vocabulary = load_tokenizer(tokenizer_path(config))
    prompts, _ = load_prompts(
        config.data.prompts,
        vocabulary,
        max_prompt_tokens=config.rollout.max_prompt_length,
        limit=limit,
        log=say,
    )
    return Task(vocabulary, prompts=prompts)


def score(run: Run, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Scores `[N]`, NaN where there is none, and which of them are valid."""
    config = run.config
    if config.reward.function:
        rewards = make_text_rewards(run)
        with rewards.function:
            found = raw_scores(list(samples), rewards, None, {})
        run.say(rewards.function.summary())
        return found
    if not config.reward_model.path:
        return np.full(len(samples), np.nan, np.float32), np.zeros(len(samples), bool)
    params = models.load(run, "reward_model", config.reward_model.path)
    model = Model(run.archs["reward_model"], params)
    return raw_scores(list(samples), None, make_scorer(run, ["scores"]), {"reward_model": model})


def table_text(out: Path, rows: int = 5, width: int = 72) -> str:
    """The first `rows` of samples.jsonl: scores, and a line each of prompt's end and response."""
    lines = []
    for line in (out / "samples.jsonl").read_text().splitlines()[:rows]:
        sample = json.loads(line)
        cut = "…" if sample["truncated"] else ""
        marks = [f"score {sample['score']}", f"{sample['length']} tokens{cut}"]
        marks += [f"gold {sample['gold']}"] if "gold" in sample else []
        lines.append(", ".join(marks))
        for name, keep in (("prompt", slice(-width, None)), ("response", slice(width))):
            lines.append(f"  {name:<9}{' '.join(sample[name].split())[keep]}")
    return "\n".join(lines)


def summary_text(values: dict[str, float]) -> str:
    """The summary, a number a line."""
    return "\n".join(f"  {name:<20}{value:.4g}" for name, value in values.items())
