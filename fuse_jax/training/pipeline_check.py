"""What pipelined training cannot run with, refused at start: the key, its value and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from fuse_jax.config import Config, IntraStageConfig
from fuse_jax.config_read import ConfigError
from fuse_jax.fusion.intra_stage import mailbox
from fuse_jax.fusion.intra_stage.tensor import shard_architecture
from fuse_jax.models.architecture import Architecture
from fuse_jax.training.pipeline_plan import Transport

MAX_TIMEOUT = 1e6  # s; the clocks that wait know no infinity
LOWEST = {"search_evaluations": 1, "drift": 0.0}
KEY = "fusion.intra_stage"


def model_stages_of(settings: IntraStageConfig, pipe: int) -> dict[str, int]:
    """Devices of one pipeline of each model."""
    return {"actor": settings.actor_stages or pipe, "critic": settings.critic_stages or pipe}


def check_pipeline(config: Config, tensor: int = 1) -> None:
    """Refuse settings of `fusion.intra_stage` that contradict `mesh.pipe` or this machine.

    Raises ConfigError.
    """
    pipe, settings = config.mesh.pipe, config.fusion.intra_stage
    for name, least in LOWEST.items():
        value = getattr(settings, name)
        if not value >= least:
            raise ConfigError(f"{KEY}.{name}={value!r}: must be at least {least:g}")
    if not 0 < settings.timeout <= MAX_TIMEOUT:
        raise ConfigError(
            f"{KEY}.timeout={settings.timeout!r}: must be above 0 and at most {MAX_TIMEOUT:g} s"
        )
    if pipe == 1:
        return
    if jax.process_count() > 1:  # each would measure tasks and search a schedule of its own
        raise ConfigError(
            f"mesh.pipe={pipe}: pipelines run inside one process, and there are "
            f"{jax.process_count()}: use 1"
        )
    for name, stages in model_stages_of(settings, pipe).items():
        if stages < 1 or pipe % stages:
            raise ConfigError(
                f"{KEY}.{name}_stages={stages}: does not divide mesh.pipe={pipe}: use a divisor, "
                "or 0 for mesh.pipe"
            )
    if settings.transport == "auto":
        return
    why = transports(pipe, tensor)[settings.transport]
    if why:
        raise ConfigError(f"{KEY}.transport={settings.transport!r}: {why}; or use 'auto'")


def check_layers(config: Config, archs: Mapping[Any, Architecture]) -> None:
    """Refuse models whose layers or heads cannot be cut. Raises ConfigError."""
    pipe = config.mesh.pipe
    if pipe == 1:
        return
    for name, stages in model_stages_of(config.fusion.intra_stage, pipe).items():
        layers = archs[name].num_layers
        if layers % stages:
            fits = [n for n in range(1, pipe + 1) if pipe % n == 0 and layers % n == 0]
            raise ConfigError(
                f"{KEY}.{name}_stages={stages}: does not divide the {name}'s {layers} layers: set "
                f"it to one of {', '.join(map(str, fits))} (divisors of the layers and of "
                f"mesh.pipe={pipe})"
            )
        try:
            shard_architecture(archs[name], max(1, config.mesh.tensor))
        except ValueError as error:
            raise ConfigError(f"mesh.tensor={config.mesh.tensor}: {error}") from error


def transports(pipe: int, tensor: int = 1) -> dict[Transport, str]:
    """Each transport, and why it cannot be used here (empty where it can)."""
    # The mailbox can call back a device that waits in it, not one that waits in a stage's own sum.
    sums = "with mesh.tensor > 1 a failed device would leave others in a collective"
    odd = f"mesh.pipe={pipe} is odd, and it deals devices into pairs" if pipe % 2 else ""
    return {
        "mailbox": (sums if tensor > 1 else "") or mailbox.unavailable_because(),
        "dispatch": "",
        "pair": odd,
        "ring": "",
    }
