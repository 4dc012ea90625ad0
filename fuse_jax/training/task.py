"""What a run trains on: prompts, demonstrations, preference pairs and their vocabulary.

Only what the run's stages read is loaded. The built-in countdown task also has a gold metric, which
is logged and never rewarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from fuse_jax.config import Config
from fuse_jax.data.countdown import Countdown
from fuse_jax.data.loading import load_demonstrations, load_preferences, load_prompts
from fuse_jax.data.order import split_held_out
from fuse_jax.data.records import Demonstration, Preference, Prompt
from fuse_jax.data.tokenizer import Vocabulary, load_tokenizer

# Sizes of the built-in data sets: enough that no item of the default recipe comes twice.
COUNTDOWN_DEMONSTRATIONS = 40_000
COUNTDOWN_PREFERENCES = 64_000
COUNTDOWN_EVAL_PREFERENCES = 1_000
Answered = TypeVar("Answered", Preference, Demonstration)


@dataclass(frozen=True)
class Task:
    """The data of a run. Lists that no stage reads are empty; `gold` is None where none exists."""

    vocabulary: Vocabulary
    prompts: Sequence[Prompt] = ()
    eval_prompts: Sequence[Prompt] = ()
    demonstrations: Sequence[Demonstration] = ()
    preferences: Sequence[Preference] = ()
    eval_preferences: Sequence[Preference] = ()
    gold: Callable[[Sequence[int], Sequence[int]], bool] | None = None
    tokenizer_path: str = field(default="")


def build_task(config: Config, log: Callable[[str], None] = print) -> Task:
    """Load (or generate) what the stages of `config` read."""
    if config.data.task == "countdown":
        return _countdown(config)
    return _files(config, log)


def _countdown(config: Config) -> Task:
    task = Countdown()
    limit = config.data.limit or None
    rng = np.random.default_rng([config.seed, 1])
    needs = set(config.stages)
    demonstrations, preferences, eval_preferences = [], [], []
    if "sft" in needs:
        demonstrations = task.demonstrations(COUNTDOWN_DEMONSTRATIONS, rng)[:limit]
    if "reward_model" in needs:
        rng = np.random.default_rng([config.seed, 2])
        preferences = task.preferences(COUNTDOWN_PREFERENCES, rng)[:limit]
        eval_preferences = task.preferences(
            COUNTDOWN_EVAL_PREFERENCES, rng, prompts=task.held_out_prompts()
        )
    return Task(
        vocabulary=task,
        prompts=task.train_prompts()[:limit],
        eval_prompts=task.held_out_prompts(),
        demonstrations=demonstrations,
        preferences=preferences,
        eval_preferences=eval_preferences,
        gold=task.gold,
    )


def tokenizer_path(config: Config) -> str:
    """The Hugging Face directory of the run's tokenizer; empty for the built-in task."""
    return "" if config.data.task == "countdown" else config.tokenizer or config.actor.path


def build_vocabulary(config: Config) -> Vocabulary:
    """What prompts and responses are written in, without the data."""
    path = tokenizer_path(config)
    return load_tokenizer(path) if path else Countdown()


def _files(config: Config, log: Callable[[str], None]) -> Task:
    path = tokenizer_path(config)
    tokenizer = load_tokenizer(path)
    data, rollout = config.data, config.rollout
    limit = data.limit or None

    def prompts(paths: str) -> list[Prompt]:
        return load_prompts(
            paths, tokenizer, max_prompt_tokens=rollout.max_prompt_length, limit=limit, log=log
        )[0]

    def pairs(paths: str) -> list[Preference]:
        row = config.reward_training.row_length
        return load_preferences(
            paths,
            tokenizer,
            max_prompt_tokens=row - 1,
            max_response_tokens=row - 1,
            limit=limit,
            log=log,
        )[0]

    def demonstrations() -> list[Demonstration]:
        row = config.sft.row_length
        return load_demonstrations(
            data.demonstrations,
            tokenizer,
            max_prompt_tokens=row - 1,
            max_response_tokens=row - 1,
            limit=limit,
            log=log,
        )[0]

    stages = set(config.stages)
    ranks = "reward_model" in stages
    task = Task(
        vocabulary=tokenizer,
        prompts=prompts(data.prompts) if "ppo" in stages else (),
        eval_prompts=prompts(data.eval_prompts) if "ppo" in stages and data.eval_prompts else (),
        demonstrations=demonstrations() if "sft" in stages else (),
        preferences=pairs(data.preferences) if ranks else (),
        eval_preferences=pairs(data.eval_preferences) if ranks and data.eval_preferences else (),
        tokenizer_path=path,
    )
    return hold_out(task, data.held_out, log) if data.held_out else task


def hold_out(task: Task, count: int, log: Callable[[str], None]) -> Task:
    """Fill the evaluation lists that no file filled, with at least `count` of the training items.

    A held-out prompt is trained on by no stage: its pairs are held out with it (or left out, where
    evaluation pairs have a file of their own), its demonstrations are left out. The split is the
    same for every seed, so that runs can be compared. Raises DataError if nothing would be left.
    """
    prompts, eval_prompts = task.prompts, task.eval_prompts
    reserved: set[bytes] = set()
    if prompts and not eval_prompts:
        prompts, eval_prompts = split_held_out(prompts, count)
        reserved = {prompt.tokens.tobytes() for prompt in eval_prompts}
    pairs, of_reserved = _apart(task.preferences, reserved)
    eval_pairs, unused = task.eval_preferences, 0
    if eval_pairs:
        unused = len(of_reserved)
    elif pairs:
        pairs, more = split_held_out(pairs, max(0, count - len(of_reserved)))
        eval_pairs = [*of_reserved, *more]
    demonstrations, passed_over = _apart(task.demonstrations, reserved)
    log(
        f"held out: {len(eval_prompts)} prompts, {len(eval_pairs)} pairs; left out, being answers "
        f"to held-out prompts: {unused} pairs, {len(passed_over)} demonstrations"
    )
    return replace(
        task,
        prompts=prompts,
        eval_prompts=eval_prompts,
        preferences=pairs,
        eval_preferences=eval_pairs,
        demonstrations=demonstrations,
    )


def _apart(
    items: Sequence[Answered], reserved: set[bytes]
) -> tuple[list[Answered], list[Answered]]:
    """Items of other prompts, and those of `reserved` ones."""
    of_reserved = [item.prompt_tokens.tobytes() in reserved for item in items]
    return (
        [item for item, theirs in zip(items, of_reserved) if not theirs],
        [item for item, theirs in zip(items, of_reserved) if theirs],
    )
