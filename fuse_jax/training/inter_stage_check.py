"""What inter-stage fusion cannot run with, refused at start: the key, its value and the fix."""

from __future__ import annotations

import jax

from fuse_jax.config import Config
from fuse_jax.config_read import ConfigError
from fuse_jax.fusion.inter_stage.instances import instance_rollout

KEY = "fusion.inter_stage"


def check_inter_stage(config: Config, data: int) -> None:
    """Refuse settings of `fusion.inter_stage` that contradict the mesh (`data` wide) or each other.

    Raises ConfigError.
    """
    settings = config.fusion.inter_stage
    instances = settings.instances
    if instances < 1 or data % instances:
        raise ConfigError(
            f"{KEY}.instances={instances}: does not divide mesh.data={data}, of which an instance "
            "is a part: use a divisor"
        )
    if instances > 1 and jax.process_count() > 1:
        raise ConfigError(
            f"{KEY}.instances={instances}: one process drives all instances, but this run has "
            f"{jax.process_count()}: use 1"
        )
    try:
        slots = instance_rollout(config.rollout, instances).slots
    except ValueError as error:  # its message names the key
        raise ConfigError(str(error)) from error
    if config.compute.scoring_tokens < instances:
        raise ConfigError(
            f"compute.scoring_tokens={config.compute.scoring_tokens}: is shared by "
            f"{KEY}.instances={instances}: raise it"
        )
    _check_plan(config, slots)


def _check_plan(config: Config, slots: int) -> None:
    settings = config.fusion.inter_stage
    threshold, keep = settings.threshold, settings.keep
    readers = {"threshold": ("fixed", "knee"), "keep": ("fixed",)}
    for name, policies in readers.items():
        value = getattr(settings, name)
        if value and settings.policy not in policies:
            raise ConfigError(
                f"{KEY}.{name}={value}: is read with {KEY}.policy={' or '.join(policies)} only, "
                f"and the policy is {settings.policy}: leave it at 0"
            )
    if threshold < 0 or keep < 0:
        raise ConfigError(f"{KEY}.threshold={threshold}, keep={keep}: must not be negative")
    if settings.policy != "fixed":  # knee chooses `keep` itself, as many as it takes
        return
    if not threshold and keep:
        raise ConfigError(f"{KEY}.keep={keep}: without a threshold nothing moves: give one")
    if threshold and settings.instances == 1:
        raise ConfigError(
            f"{KEY}.threshold={threshold}: one instance has nowhere to move samples to: use 0, or "
            f"more than {KEY}.instances=1"
        )
    if threshold and not 1 <= keep < settings.instances:
        raise ConfigError(
            f"{KEY}.keep={keep}: must be from 1 to {settings.instances - 1}, below "
            f"{KEY}.instances={settings.instances}"
        )
    if threshold > keep * slots:
        raise ConfigError(
            f"{KEY}.threshold={threshold}: that many samples do not fit the {slots} slots each of "
            f"{KEY}.keep={keep} instances: lower it to {keep * slots}, or keep more"
        )
