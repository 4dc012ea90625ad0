"""A run's checkpoints come out as Hugging Face directories, bit for bit, or are refused by name."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from fuse_jax.config_read import ConfigError, default_config, read_config
from fuse_jax.models.hf import load_params, read_architecture
from fuse_jax.training.checkpoint import CheckpointError
from fuse_jax.training.context import claim, read_run_config
from fuse_jax.training.export_run import export_run

CASES = {
    "default": ({}, ("actor", "ppo", 2)),
    "an older step": ({"step": 1}, ("actor", "ppo", 1)),
    "critic": ({"model": "critic"}, ("critic", "ppo", 2)),
    "best": ({"stage": "best"}, ("actor", "best", 1)),
    "reward model": ({"model": "reward_model"}, ("reward_model", "reward_model", 7)),
    "stage alone": ({"stage": "reward_model"}, ("reward_model", "reward_model", 7)),
}


def same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("case", CASES)
def test_what_was_saved_is_what_is_written(case, workdir, tmp_path):
    arguments, expected = CASES[case]
    directory, _, saved = workdir
    assert export_run(directory, tmp_path / "out", **arguments) == expected
    role, stage, step = expected
    head = "lm" if role == "actor" else "scalar"
    arch = read_architecture(tmp_path / "out")
    same(load_params(tmp_path / "out", arch, head=head), saved[stage, step][role])
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"]) == (1, 0)


REFUSED = {
    "stage not run": ({"stage": "sft"}, ConfigError, "--stage=sft: not among the checkpoints"),
    "wrong pair": (
        {"model": "critic", "stage": "best"},
        ConfigError,
        "--model=critic --stage=best: not among the checkpoints",
    ),
    "step": ({"step": 5}, CheckpointError, r"no checkpoint 5 here, only \[1, 2\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_is_refused_with_what_is(case, workdir, tmp_path):
    arguments, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        export_run(workdir[0], tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_refusals_list_what_the_run_holds(workdir, tmp_path):
    with pytest.raises(ConfigError, match="--stage=ppo: actor or critic; --stage=best: actor; "):
        export_run(workdir[0], tmp_path / "out", stage="sft")


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json is missing: name a run's directory"):
        export_run(tmp_path, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_directory_in_the_way_is_kept(workdir, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        export_run(workdir[0], tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_run_without_any_save_says_so(workdir, tmp_path):
    claim(workdir[1], tmp_path / "fresh", resume=False)
    with pytest.raises(ConfigError, match=r"--workdir: .* holds none yet"):
        export_run(tmp_path / "fresh", tmp_path / "out")


def test_settings_come_back_from_the_work_directory(tmp_path):
    settings = default_config()
    settings.stages = "sft,ppo"
    settings.compute.sequence_buckets = "16,40"
    settings.rollout.prompt_buckets = ""
    settings.ppo.target_kl = 0.5
    settings.reward.missing_eos_penalty = None
    config = read_config(settings)
    claim(config, tmp_path, resume=False)
    assert read_run_config(tmp_path) == config
    other = dataclasses.replace(config, seed=3)
    claim(other, tmp_path / "other", resume=False)
    assert read_run_config(tmp_path / "other") == other


def test_command(workdir, tmp_path, launch):
    to = ("export.py", "--workdir", workdir[0], "--out", tmp_path / "a")
    assert launch(*to, "--model=critic") == (0, f"critic of ppo, step 2 -> {tmp_path / 'a'}\n")
    assert (tmp_path / "a" / "model.safetensors").is_file()
    assert launch(*to)[0].startswith("error: ")  # it is not empty now
