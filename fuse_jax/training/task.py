"""What a run trains on: prompts, demonstrations, preference pairs and their vocabulary.

Only what the run's stages read is loaded. The built-in countdown task also has a gold metric, which
is logged and never rewarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fuse_jax.config import Config
from fuse_jax.data.countdown import Countdown
from fuse_jax.data.loading import load_demonstrations, load_preferences, load_prompts
from fuse_jax.data.records import Demonstration, Preference, Prompt
from fuse_jax.data.tokenizer import Vocabulary, load_tokenizer

# Sizes of the built-in data sets: enough that no item of the default recipe comes twice.
COUNTDOWN_DEMONSTRATIONS = 40_000
COUNTDOWN_PREFERENCES = 64_000
COUNTDOWN_EVAL_PREFERENCES = 1_000


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


def _files(config: Config, log: Callable[[str], None]) -> Task:
    path = config.tokenizer or config.actor.path
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
    return Task(
        vocabulary=tokenizer,
        prompts=prompts(data.prompts) if "ppo" in stages else (),
        eval_prompts=prompts(data.eval_prompts) if "ppo" in stages else (),
        demonstrations=demonstrations() if "sft" in stages else (),
        preferences=pairs(data.preferences) if ranks else (),
        eval_preferences=pairs(data.eval_preferences) if ranks and data.eval_preferences else (),
        tokenizer_path=path,
    )
