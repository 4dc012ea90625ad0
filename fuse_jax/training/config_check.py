"""What must hold between the settings of a run, refused before anything loads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import jax

from fuse_jax.buckets import automatic_lengths
from fuse_jax.config import STAGES, Config
from fuse_jax.config_read import ConfigError
from fuse_jax.data.files import find_files
from fuse_jax.data.records import DataError
from fuse_jax.placement.mesh import mesh_sizes, use_cpu_devices
from fuse_jax.placement.sharding import check_divisible
from fuse_jax.rollout.sampling import MIN_TEMPERATURE
from fuse_jax.scoring.reward_function import check_reward_function
from fuse_jax.training.inter_stage_check import check_inter_stage
from fuse_jax.training.pipeline_check import check_pipeline


def count_devices(config: Config) -> int:
    """Devices of this process, `mesh.cpu_devices` of them where that is set. Starts JAX."""
    try:
        use_cpu_devices(config.mesh.cpu_devices)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return jax.device_count()


def check_config(config: Config, *, device_count: int) -> None:
    """Refuse, before anything loads, what cannot run on `device_count` devices."""
    _stages(config)
    check_settings(config, device_count=device_count)


def check_settings(config: Config, *, device_count: int) -> None:
    """The same for a configuration that may have no stage at all (evaluation)."""
    for check in (_ranges, _sampling, _kl, _files, _lengths):
        check(config)
    check_mesh(config, device_count)


def _refuse(key: str, value: Any, problem: str) -> NoReturn:
    raise ConfigError(f"{key}={value!r}: {problem}")


def _stages(config: Config) -> None:
    stages = config.stages
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown or not stages or list(stages) != [s for s in STAGES if s in stages]:
        _refuse("stages", ",".join(stages), f"give one or more of {','.join(STAGES)}, in order")
    if "sft" not in stages and not config.actor.path:
        _refuse("stages", ",".join(stages), "without sft, actor.path must name an HF directory")
    if "ppo" not in stages:
        return
    no_reward_model = "reward_model" not in stages and not config.reward_model.path
    if no_reward_model and config.reward.source == "model":
        _refuse(
            "stages",
            ",".join(stages),
            "without reward_model, reward_model.path must name an HF directory, or "
            "reward.source=function with reward.function",
        )
    if no_reward_model and not config.critic.path and config.critic.init == "reward_model":
        _refuse("critic.init", config.critic.init, "there is no reward model: use 'actor'")
    reward = config.reward
    if reward.source == "function" and not reward.function:
        _refuse("reward.function", "", "name it as package.module:name or path/to/file.py:name")
    if reward.source == "model" and reward.function:
        _refuse("reward.function", reward.function, "it is read with reward.source=function only")


def check_reward(function: str) -> None:
    """Load the reward function in a worker, as the run will, so that a bad one ends the run now."""
    try:
        check_reward_function(function)
    except ValueError as error:  # its message begins with the key
        raise ConfigError(str(error)) from error


_AT_LEAST: dict[str, float] = {
    "seed": 0,
    "rollout.slots": 1,
    "rollout.max_prompt_length": 1,
    "rollout.max_new_tokens": 1,
    "rollout.chunk": 1,
    "rollout.prefill_rows": 1,
    "rollout.cache_block": 1,
    "rollout.top_k": 0,
    "compute.micro_batch_tokens": 1,
    "compute.scoring_tokens": 1,
    "compute.log_prob_chunk": 0,
    "reward.workers": 1,
    "reward.clip": 0,
    "ppo.iterations": 1,
    "ppo.prompts_per_iteration": 1,
    "ppo.minibatches": 1,
    "ppo.epochs": 1,
    "ppo.critic_warmup": 0,
    "ppo.entropy_coef": 0,
    "ppo.max_skipped_updates": 0,
    "ppo.kl.coef": 0,
    "ppo.kl.horizon": 1,
    "ppo.kl.stop_above": 0,
    "sft.steps": 1,
    "sft.rows": 1,
    "sft.row_length": 2,
    "reward_training.steps": 1,
    "reward_training.rows": 1,
    "reward_training.row_length": 2,
    "reward_training.max_pairs": 1,
    "reward_training.score_l2": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "evaluation.every": 0,
    "evaluation.prompts": 1,
    "evaluation.samples_per_prompt": 1,
    "evaluation.samples_shown": 0,
    "data.limit": 0,
    "data.held_out": 0,
    "mesh.cpu_devices": 0,
}
_ABOVE_ZERO = (
    "reward.timeout",
    "ppo.clip_eps",
    "ppo.clip_eps_high",
    "ppo.value_clip_eps",
    "ppo.target_kl",
    "ppo.kl.target",
)
_OPTIMIZERS = (
    "ppo.actor_optimizer",
    "ppo.critic_optimizer",
    "sft.optimizer",
    "reward_training.optimizer",
)


def setting(config: Config, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _ranges(config: Config) -> None:
    for key, least in _AT_LEAST.items():
        value = setting(config, key)
        if not value >= least:  # NaN too
            _refuse(key, value, f"must be at least {least:g}")
    for key in _ABOVE_ZERO:
        value = setting(config, key)
        if value is not None and not value > 0:
            _refuse(key, value, "must be above 0")
    for name in _OPTIMIZERS:
        for entry in ("learning_rate", "weight_decay", "max_grad_norm", "eps"):
            value = setting(config, f"{name}.{entry}")
            if not value >= 0:
                _refuse(f"{name}.{entry}", value, "must not be negative")
        final = setting(config, f"{name}.final_fraction")
        if not 0 <= final <= 1:
            _refuse(f"{name}.final_fraction", final, "must be in [0, 1]")
        for entry in ("b1", "b2", "warmup_fraction"):
            value = setting(config, f"{name}.{entry}")
            if not 0 <= value < 1:
                _refuse(f"{name}.{entry}", value, "must be in [0, 1)")
    for key in ("ppo.gamma", "ppo.gae_lambda"):
        if not 0 <= setting(config, key) <= 1:
            _refuse(key, setting(config, key), "must be in [0, 1]")
    if config.ppo.clip_eps > 1:
        _refuse("ppo.clip_eps", config.ppo.clip_eps, "must be at most 1: no ratio is below 0")
    if config.ppo.dual_clip is not None and not config.ppo.dual_clip > 1:
        _refuse("ppo.dual_clip", config.ppo.dual_clip, "must be above 1 (arXiv 1912.09729)")
    count, parts = config.ppo.prompts_per_iteration, config.ppo.minibatches
    if count % parts:
        _refuse(
            "ppo.minibatches",
            parts,
            f"does not divide ppo.prompts_per_iteration={count}: use a divisor of {count}",
        )


def _sampling(config: Config) -> None:
    rollout = config.rollout
    if not 0 < rollout.top_p <= 1:
        _refuse("rollout.top_p", rollout.top_p, "must be in (0, 1]; 1 is off")
    if not 0 <= rollout.temperature < math.inf:
        _refuse("rollout.temperature", rollout.temperature, "must not be negative or infinite")
    if 0 < rollout.temperature < MIN_TEMPERATURE:
        _refuse(
            "rollout.temperature",
            rollout.temperature,
            f"would overflow the logits: use at least {MIN_TEMPERATURE:g}, or 0 (greedy)",
        )
    if "ppo" not in config.stages:
        return
    if rollout.temperature == 0:
        _refuse("rollout.temperature", 0.0, "PPO samples: use a temperature above 0")
    cut = rollout.top_k > 0 or rollout.top_p < 1
    if cut and not config.ppo.recompute_log_probs:
        _refuse(
            "ppo.recompute_log_probs",
            False,
            "top-k or top-p sampling draws from a cut distribution that the trainer does not see: "
            "set it to True (old log-probs from the trainer's forward), or switch top_k, top_p off",
        )


def _kl(config: Config) -> None:
    kl = config.ppo.kl
    if kl.placement == "loss" and kl.estimator not in ("k2", "k3"):
        why = (
            "the gradient of k1 or its size in the loss is not that of the KL"
            if kl.estimator in ("k1", "abs")
            else "the full KL needs the reference model inside the update"
        )
        _refuse("ppo.kl.estimator", kl.estimator, f"{why}: use k2 or k3, or kl.placement=reward")


def _files(config: Config) -> None:
    keys = ["actor.path", "reference.path", "reward_model.path", "critic.path", "tokenizer"]
    for key in keys:
        value = setting(config, key)
        if value and not Path(value).is_dir():
            _refuse(key, value, "no such directory: give a local Hugging Face model directory")
    if config.data.task != "files":
        if config.data.held_out:
            _refuse("data.held_out", config.data.held_out, "the built-in task has its own split")
        return
    needed = {"sft": "demonstrations", "reward_model": "preferences", "ppo": "prompts"}
    for stage in config.stages:
        if not getattr(config.data, needed[stage]):
            _refuse(f"data.{needed[stage]}", "", f"stage {stage} reads it: name a file or glob")
    for key in ("prompts", "eval_prompts", "preferences", "eval_preferences", "demonstrations"):
        value = getattr(config.data, key)
        try:
            if value:
                find_files(value)
        except DataError as error:
            raise ConfigError(f"data.{key}={value!r}: {error}") from error
    if not config.tokenizer and not config.actor.path:
        _refuse("tokenizer", "", "data.task=files needs a tokenizer: give its HF directory")
    if "ppo" in config.stages and not config.data.eval_prompts and not config.data.held_out:
        _refuse(
            "data.eval_prompts",
            "",
            "held-out evaluation reads it: name a file or glob, or keep some of data.prompts from "
            "training with data.held_out",
        )


def longest_sequence(config: Config) -> int:
    """Prompt and response together at their caps, in tokens."""
    return config.rollout.max_prompt_length + config.rollout.max_new_tokens


def sequence_lengths(config: Config) -> tuple[int, ...]:
    """Bucket lengths of scoring and training, given or automatic."""
    return config.compute.sequence_buckets or automatic_lengths(longest_sequence(config))


def _lengths(config: Config) -> None:
    longest, lengths = longest_sequence(config), sequence_lengths(config)
    # Prompt and response have a token each at least.
    for key, shortest in (("compute.sequence_buckets", 2), ("rollout.prompt_buckets", 1)):
        given = setting(config, key)
        if given and min(given) < shortest:
            _refuse(key, ",".join(map(str, given)), f"no length may be below {shortest}")
    if max(lengths) < longest:
        _refuse(
            "compute.sequence_buckets",
            ",".join(map(str, lengths)),
            f"the longest is below max_prompt_length + max_new_tokens = {longest}: add {longest}",
        )
    prompts = config.rollout.prompt_buckets
    if prompts and max(prompts) < config.rollout.max_prompt_length:
        _refuse(
            "rollout.prompt_buckets",
            ",".join(map(str, prompts)),
            f"the longest is below rollout.max_prompt_length={config.rollout.max_prompt_length}",
        )


def check_mesh(config: Config, device_count: int) -> None:
    """The mesh must fit the devices and the heads, and every batch divide over its shards."""
    try:
        data, fsdp, tensor = mesh_sizes(config.mesh, device_count)
        if not config.actor.path:  # else no model has the sizes of config.model
            check_divisible(config.model, replace(config.mesh, tensor=tensor))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    pipe = config.mesh.pipe
    if pipe < 1 or data % pipe:
        _refuse("mesh.pipe", pipe, f"does not divide mesh.data={data}: use a divisor of it")
    if pipe > 1 and fsdp > 1:
        _refuse("mesh.fsdp", fsdp, f"must be 1 with mesh.pipe={pipe}: a stage's weights stay whole")
    check_pipeline(config, tensor)
    check_inter_stage(config, data)
    shards = data * fsdp
    batches = {
        "rollout.slots": config.rollout.slots,
        "rollout.prefill_rows": config.rollout.prefill_rows,
    }
    if "sft" in config.stages:
        batches["sft.rows"] = config.sft.rows
    if "reward_model" in config.stages:
        batches["reward_training.rows"] = config.reward_training.rows
    for key, size in batches.items():
        if size % shards:
            _refuse(
                key,
                size,
                f"does not divide over mesh.data x mesh.fsdp = {shards} shards: use a multiple",
            )
