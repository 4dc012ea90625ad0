"""A model of a run, from its checkpoints to a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax

from fuse_jax.config_read import ConfigError
from fuse_jax.models.hf import parameter_shapes
from fuse_jax.placement.mesh import single_device_mesh
from fuse_jax.placement.sharding import parameter_specs
from fuse_jax.training import models
from fuse_jax.training.checkpoint import read_part
from fuse_jax.training.context import Role, architectures, read_run_config
from fuse_jax.training.task import build_vocabulary, tokenizer_path

# The models that each stage's saves hold; where none is named, stages are tried in this order.
STAGES: dict[str, tuple[Role, ...]] = {
    "ppo": ("actor", "critic"),
    "best": ("actor",),
    "sft": ("actor",),
    "reward_model": ("reward_model",),
}


class Exported(NamedTuple):
    """Which save an exported model came from."""

    model: Role
    stage: str
    step: int


def export_run(
    workdir: Path, out: Path, *, model: str = "", stage: str = "", step: int | None = None
) -> Exported:
    """Write a model of the run in `workdir` as the Hugging Face directory `out`.

    stage: sft, reward_model, ppo, or best (PPO's actor with the best held-out score); default the
    last stage of the run that holds `model`. model: actor, critic or reward_model; default the
    stage's first. step: default the newest that was kept. Written in the dtype the run computed in.
    Only that model's parameters are read, so an actor's optimiser need not fit in memory.

    Raises:
      ConfigError, CheckpointError: nothing of that name was saved; the message says what was.
      FileExistsError: `out` is there and not empty.
    """
    config = read_run_config(workdir)
    stage, role = choose(workdir, model, stage)
    arch = architectures(config)[role]
    vocabulary = build_vocabulary(config)
    head = "scalar" if models.HEADS[role] == "scalar" else "lm"
    shapes = parameter_shapes(arch, head)
    places = parameter_specs(arch, shapes, single_device_mesh())
    like: Any = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places
    )
    groups = {"ppo": ("train", "params"), "best": ()}.get(stage, ("params",))
    tree = {role: like}
    for group in reversed(groups):
        tree = {group: tree}
    step, arrays = read_part(workdir / "checkpoints" / stage, tree, step)
    for group in groups:
        arrays = arrays[group]
    models.write(
        out,
        role,
        arch,
        arrays[role],
        dtype=config.compute.dtype,
        vocabulary=vocabulary,
        tokenizer_path=tokenizer_path(config),
    )
    return Exported(role, stage, step)


def choose(workdir: Path, model: str, stage: str) -> tuple[str, Role]:
    """The stage and model meant by `model` and `stage`, either of which may be empty.

    Raises ConfigError naming what the run has saved.
    """
    saved = [name for name in STAGES if (workdir / "checkpoints" / name).is_dir()]
    has = "; ".join(f"--stage={name}: {' or '.join(STAGES[name])}" for name in saved)
    for name in [stage] if stage else saved:
        roles = STAGES.get(name, ())
        if name in saved and (not model or model in roles):
            return name, next(role for role in roles if model in ("", role))
    asked = " ".join(f"--{key}={v}" for key, v in (("model", model), ("stage", stage)) if v)
    raise ConfigError(
        f"{asked or '--workdir'}: not among the checkpoints of {workdir}, which holds "
        f"{has or 'none yet'}"
    )
