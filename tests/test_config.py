"""Settings: defaults survive the round trip, and every refusal names its key."""

import runpy
from pathlib import Path

import pytest

from fuse_jax.config import Config
from fuse_jax.config_read import ConfigError, default_config, read_config
from fuse_jax.training.config_check import check_config

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.py"))


def changed(**settings) -> dict:
    """The defaults as a plain dict (which takes any key and type), with some keys changed."""
    config = default_config().to_dict()
    for key, value in settings.items():
        *groups, name = key.split("__")
        group = config
        for part in groups:
            group = group[part]
        group[name] = value
    return config


def checked(devices: int = 1, **settings) -> Config:
    config = read_config(changed(**settings))
    check_config(config, device_count=devices)
    return config


def test_defaults_survive_the_round_trip():
    assert read_config(default_config()) == Config()
    checked()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipes_are_read_and_documented(path):
    recipe = runpy.run_path(str(path))
    assert "python launch/" in recipe["__doc__"]
    assert read_config(recipe["get_config"]()).stages


def test_tuples_are_comma_separated_strings():
    config = checked(stages="sft,reward_model", compute__sequence_buckets="16, 48")
    assert config.stages == ("sft", "reward_model")
    assert config.compute.sequence_buckets == (16, 48)


def test_placeholders_take_values():
    assert checked(ppo__target_kl=0.1).ppo.target_kl == 0.1
    assert checked().ppo.target_kl is None
    assert checked(reward__missing_eos_penalty=None).reward.missing_eos_penalty is None


REFUSED = {
    "ppo.minibatchs": ({"ppo__minibatchs": 4}, "did you mean ppo.minibatches"),
    "ppo.iterations": ({"ppo__iterations": "many"}, "expected int"),
    "sft.steps": ({"sft__steps": True}, "expected int"),
    "reward.source": ({"reward__source": "oracle"}, "'model', 'function'"),
    "ppo.minibatches": ({"ppo__minibatches": 5}, "divisor of 128"),
    "rollout.slots": ({"rollout__slots": 0}, "at least 1"),
    "stages": ({"stages": "ppo,sft"}, "in order"),
    "stages ": ({"stages": "reward_model"}, "actor.path"),
    "reward.function": ({"reward__source": "function"}, "package.module:name"),
    "rollout.top_p": ({"rollout__top_p": 0.0}, "(0, 1]"),
    "rollout.temperature": ({"rollout__temperature": 0.0}, "above 0"),
    "ppo.recompute_log_probs": ({"rollout__top_k": 5}, "set it to True"),
    "ppo.kl.estimator": ({"ppo__kl__placement": "loss"}, "k2 or k3"),
    "actor.path": ({"actor__path": "/nowhere"}, "no such directory"),
    "data.demonstrations": ({"data__task": "files"}, "name a file"),
    "compute.sequence_buckets": ({"compute__sequence_buckets": "16"}, "add 44"),
    "rollout.prompt_buckets": ({"rollout__prompt_buckets": "4"}, "max_prompt_length"),
    "mesh": ({"mesh__tensor": 3}, "does not divide"),
    "ppo.dual_clip": ({"ppo__dual_clip": 0.5}, "above 1"),
    "ppo.actor_optimizer.b1": ({"ppo__actor_optimizer__b1": 1.0}, "[0, 1)"),
    "ppo.gamma": ({"ppo__gamma": 1.5}, "[0, 1]"),
    "ppo.gamma ": ({"ppo__gamma": float("nan")}, "[0, 1]"),
    "ppo.clip_eps": ({"ppo__clip_eps": 1.5}, "at most 1"),
    "ppo.kl.coef": ({"ppo__kl__coef": float("nan")}, "at least 0"),
    "reward.timeout": ({"reward__timeout": float("nan")}, "above 0"),
    "rollout.temperature ": ({"rollout__temperature": 1e-4}, "at least 0.001"),
    "rollout.temperature  ": ({"rollout__temperature": float("nan")}, "must not be negative"),
    "sft.optimizer.final_fraction": ({"sft__optimizer__final_fraction": 1.5}, "[0, 1]"),
    "seed": ({"seed": -1}, "at least 0"),
    "compute.sequence_buckets ": ({"compute__sequence_buckets": "0,64"}, "below 2"),
    "rollout.prompt_buckets ": ({"rollout__prompt_buckets": "-4,8"}, "below 1"),
    "reward.function ": ({"reward__function": "a.b:c"}, "reward.source=function"),
    "mesh.tensor": ({"mesh__tensor": -1, "mesh__data": 1}, "num_heads"),
    "critic.init": (
        {
            "stages": "sft,ppo",
            "reward__source": "function",
            "reward__function": "fuse_jax.data.gsm8k:reward",
        },
        "'actor'",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_refusals_name_the_key_and_the_fix(key):
    settings, fix = REFUSED[key]
    with pytest.raises(ConfigError) as refusal:
        checked(devices=8, **settings)
    assert key.strip() in str(refusal.value)
    assert fix in str(refusal.value)


def test_batches_must_divide_over_the_mesh():
    checked(devices=8)
    with pytest.raises(ConfigError, match=r"rollout.slots=60.*8 shards"):
        checked(devices=8, rollout__slots=60)
    with pytest.raises(ConfigError, match=r"sft.rows=20"):
        checked(devices=8, sft__rows=20)


@pytest.mark.parametrize(("heads", "kv", "good"), [(8, 2, True), (8, 8, True), (6, 2, False)])
def test_heads_must_divide_over_tensor(heads, kv, good):
    settings = {"model__num_heads": heads, "model__num_kv_heads": kv, "mesh__tensor": 4}
    if good:
        checked(devices=8, **settings)
    else:
        with pytest.raises(ConfigError, match=r"model.num_heads"):
            checked(devices=8, **settings)


def test_the_mesh_is_not_held_to_a_model_that_a_path_replaces(tmp_path):
    settings = {"actor__path": str(tmp_path), "stages": "sft", "mesh__tensor": 4}
    checked(devices=8, **settings)  # model.num_heads=2 is nobody's
