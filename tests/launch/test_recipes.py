"""Recipes for models and data of one's own: what they refuse, and what they do with one file."""

import gzip
import json
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from fuse_jax.config_read import ConfigError, read_config
from fuse_jax.data.records import DataError, Demonstration, Preference, Prompt
from fuse_jax.training import models
from fuse_jax.training.config_check import check_config
from fuse_jax.training.context import open_run
from fuse_jax.training.run import train
from fuse_jax.training.task import Task, hold_out

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Preference pairs of 20 prompts and questions of 20 more, as the public files have them."""
    directory = tmp_path_factory.mktemp("data")
    with gzip.open(directory / "pairs.jsonl.gz", "wt") as lines:
        for n in range(20):
            start = f"\n\nHuman: How many eggs and {n} ducks?\n\nAssistant:"
            pair = {"chosen": f"{start} {n} and some", "rejected": f"{start} the market"}
            lines.write(json.dumps(pair) + "\n")
    with open(directory / "questions.jsonl", "w") as lines:
        for n in range(20):
            lines.write(json.dumps({"question": f"{n} ducks?", "answer": f"#### {n}"}) + "\n")
    return directory


def recipe(name, model, data, **changed):
    """A recipe with its paths given; dotted keys with `__`."""
    settings = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    settings.actor.path = str(model)
    if name == "hh_smollm2":
        settings.data.preferences = settings.data.prompts = str(data / "pairs.jsonl.gz")
    else:
        settings.data.prompts = settings.data.eval_prompts = str(data / "questions.jsonl")
    for key, value in changed.items():
        *groups, last = key.split("__")
        group = settings
        for part in groups:
            group = group[part]
        group[last] = value
    return settings


NAMES = ("hh_smollm2", "gsm8k")


@pytest.mark.parametrize("name", NAMES)
def test_recipe_runs_with_its_paths_and_says_which_it_lacks(name, chat_model, data):
    check_config(read_config(recipe(name, chat_model, data)), device_count=1)
    lacking = {
        "actor__path": "actor.path must name an HF directory",
        "data__prompts": "data.prompts='': stage ppo reads it",
    }
    lacking |= (
        {"data__preferences": "data.preferences='': stage reward_model", "data__held_out": "eval"}
        if name == "hh_smollm2"
        else {"data__eval_prompts": "keep some of data.prompts from training with data.held_out"}
    )
    for key, message in lacking.items():
        empty = {key: 0 if key == "data__held_out" else ""}
        with pytest.raises(ConfigError, match=message):
            check_config(read_config(recipe(name, chat_model, data, **empty)), device_count=1)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"data__prompts": "nowhere.jsonl"}, "data.prompts='nowhere.jsonl': no file at nowhere"),
        (
            {"reward_training__optimizer__warmup_fraction": 1.0},
            r"reward_training.*warmup_fraction=1",
        ),
        ({"data__held_out": -1}, "data.held_out=-1: must be at least 0"),
        ({"data__task": "countdown"}, "data.held_out=.*: the built-in task has its own split"),
    ],
)
def test_refusals_come_before_anything_loads(changed, message, chat_model, data):
    config = read_config(recipe("hh_smollm2", chat_model, data, **changed))
    with pytest.raises(ConfigError, match=message):
        check_config(config, device_count=1)


def test_a_plain_language_model_is_a_trunk_but_no_frozen_reward_model(
    chat_model, chat_reward_model, data, tmp_path
):
    def opened(name, stages, path):
        changed = {"stages": stages, "reward_model__path": str(path), "data__held_out": 3}
        settings = recipe("hh_smollm2", chat_model, data, mesh__data=1, **changed)
        return open_run(
            read_config(settings), tmp_path / name, resume=False, say=lambda line: said.append(line)
        )

    said = []
    with pytest.raises(ConfigError, match=r"a plain language model, without score.weight: give"):
        opened("frozen", "ppo", chat_model)
    assert not (tmp_path / "frozen").exists()

    run = opened("trained", "reward_model,ppo", chat_model)
    actor = models.initial_actor(run)
    trunk = models.initial_reward_model(run, actor)
    assert "its trunk gets a fresh scalar head" in said[-1]
    assert not np.any(trunk["head"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, trunk["blocks"], actor["blocks"])

    scored = models.initial_reward_model(opened("scored", "ppo", chat_reward_model), actor)
    assert np.any(scored["head"]["kernel"])


def prompt(n):
    return Prompt(n, np.array([n, 1], np.int32), str(n))


def pair(n):
    return Preference(prompt(n).tokens, np.array([2], np.int32), np.array([3], np.int32))


def demonstration(n):
    return Demonstration(prompt(n).tokens, np.array([2], np.int32))


def key(item):
    return (item.tokens if isinstance(item, Prompt) else item.prompt_tokens).tobytes()


def test_no_stage_trains_on_a_held_out_prompt():
    every = [prompt(n % 30) for n in range(60)]  # each prompt twice
    task = Task(
        None,  # type: ignore[arg-type]
        prompts=every,
        preferences=[pair(n) for n in range(10, 40)],
        demonstrations=[demonstration(n) for n in range(0, 40, 2)],
    )
    said = []
    split = hold_out(task, 8, said.append)
    reserved = {key(item) for item in split.eval_prompts}
    assert len(split.eval_prompts) == 8 and len(reserved) == 4  # both copies go together
    assert len(split.eval_preferences) == 8
    for training in (split.prompts, split.preferences, split.demonstrations):
        assert training and not reserved & {key(item) for item in training}
    assert not {key(i) for i in split.eval_preferences} & {key(i) for i in split.preferences}
    assert len(split.prompts) + len(split.eval_prompts) == 60
    assert len(split.preferences) + len(split.eval_preferences) == 30
    left_out = 20 - len(split.demonstrations)
    assert f"{left_out} demonstrations" in said[0] and left_out > 0


def test_files_of_their_own_are_left_alone():
    task = Task(
        None,  # type: ignore[arg-type]
        prompts=[prompt(n) for n in range(10)],
        eval_prompts=[prompt(99)],
        preferences=[pair(n) for n in range(10)],
        eval_preferences=[pair(98)],
    )
    split = hold_out(task, 4, print)
    assert split.prompts == task.prompts and split.eval_prompts == task.eval_prompts
    assert list(split.preferences) == list(task.preferences)
    assert split.eval_preferences == task.eval_preferences


def test_holding_everything_out_is_refused():
    task = Task(None, prompts=[prompt(n) for n in range(5)])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="5 of 5 items held out leaves none to train on"):
        hold_out(task, 5, print)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_recipe_trains_a_tiny_model(name, chat_model, data, tmp_path):
    settings = recipe(
        name,
        chat_model,
        data,
        mesh__data=1,
        evaluation__prompts=4,
        reward_training__steps=4,
        **({"data__held_out": 4} if name == "hh_smollm2" else {"rollout__max_new_tokens": 16}),
    )
    report = train(settings, tmp_path / "run")
    assert report["iterations"] == 2 and report["excluded"] == 0
    assert np.isfinite(report["reward_after"]) and np.isfinite(report["kl"])
    assert (tmp_path / "run" / "models" / "actor" / "tokenizer.json").is_file()
