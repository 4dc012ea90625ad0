"""What every stage of a run shares: settings, devices, data, models' shapes, and where to write."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fuse_jax.config import Config, MeshConfig
from fuse_jax.config_read import ConfigError, read_config
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.families import HEAD_NAMES
from fuse_jax.models.hf import read_architecture
from fuse_jax.models.safetensors_io import find_tensors
from fuse_jax.placement.mesh import make_mesh
from fuse_jax.placement.sharding import check_divisible
from fuse_jax.training.checkpoint import Checkpoints
from fuse_jax.training.metrics import RunLog
from fuse_jax.training.pipeline_check import check_layers
from fuse_jax.training.same_tokenizer import check_same_tokenizer
from fuse_jax.training.task import Task, build_task

Role = Literal["actor", "reference", "critic", "reward_model"]
# Settings that a resumed run may change: none of them changes a number that is computed.
MAY_CHANGE = (
    "checkpoint.every",
    "checkpoint.keep",
    "compute.precompile",
    "evaluation.samples_shown",
    # Two schedules through one executor add up the same gradients in the same order.
    "fusion.intra_stage.drift",
    "fusion.intra_stage.schedule",
    "fusion.intra_stage.search_evaluations",
    "fusion.intra_stage.timeout",
    "reward.workers",
)


@dataclass(frozen=True)
class Run:
    """A run that has started. `archs` holds the architecture of each role."""

    config: Config
    workdir: Path
    mesh: Mesh
    task: Task
    archs: dict[Role, Architecture]
    log: RunLog
    resume: bool
    say: Callable[[str], None]

    @property
    def dtype(self) -> Any:
        """What the models compute in; parameters stay float32."""
        return jnp.dtype(self.config.compute.dtype)

    def checkpoints(self, stage: str, *, keep: int | None = None) -> Checkpoints:
        """The saves of one stage."""
        keep = keep or self.config.checkpoint.keep
        return Checkpoints(self.workdir / "checkpoints" / stage, keep=keep)

    def resumes(self, stage: str) -> bool:
        """Whether this run goes on from a save of `stage`."""
        if not self.resume:
            return False
        saves = self.checkpoints(stage)
        found = saves.latest() is not None
        saves.close()
        return found

    def key(self, purpose: int) -> jax.Array:
        """A random key of the run's seed; each use has a `purpose` number of its own."""
        return jax.random.fold_in(jax.random.key(self.config.seed), purpose)


CLAIM = "config.json"  # in a work directory: the settings of its run
# Purposes of random keys.
INIT_ACTOR, SAMPLE = 0, 2


def open_run(config: Config, workdir: Path, *, resume: bool, say: Callable[[str], None]) -> Run:
    """Read the data and the architectures, and claim (or resume) the work directory.

    Raises:
      ConfigError: an architecture does not fit the mesh or the vocabulary, the directory holds
        another run, or `resume` changes a setting that decides numbers.
    """
    archs = architectures(config)
    mesh = make_mesh(config.mesh)
    check_cuts(archs, mesh)
    if "ppo" in config.stages:
        check_layers(config, archs)
    check_score_head(config)
    check_claim(config, workdir, resume=resume)
    task = build_task(config, say)
    check_lengths(config, archs, task)
    for role, arch in archs.items():
        if arch.vocab_size < task.vocabulary.vocab_size:
            raise ConfigError(
                f"{_source(config, role)}: its vocabulary of {arch.vocab_size} is smaller than the "
                f"tokenizer's {task.vocabulary.vocab_size}: use the model's own tokenizer, or "
                "raise model.vocab_size"
            )
    check_same_tokenizer(config, task.vocabulary, task.tokenizer_path, say)
    # Not before everything is read: a directory that a refused run had claimed would be of no use.
    if resume and not (workdir / CLAIM).exists():
        say(f"--resume: {workdir} holds no run yet: starting one")
    claim(config, workdir, resume=resume)
    return Run(config, workdir, mesh, task, archs, RunLog(workdir), resume, say)


def check_cuts(archs: Mapping[Role, Architecture], mesh: Mesh) -> None:
    """Refuse a mesh that cannot cut one of the models."""
    sizes = MeshConfig(**mesh.shape)
    for role, arch in archs.items():
        with refusing(role):
            check_divisible(arch, sizes)


def check_lengths(config: Config, archs: Mapping[Role, Architecture], task: Task) -> None:
    """Refuse prompts that generation cannot hold, and positions that a model never had."""
    cap = config.rollout.max_prompt_length
    longest = max((len(p.tokens) for p in (*task.prompts, *task.eval_prompts)), default=0)
    if "ppo" not in config.stages:
        return
    if longest > cap:
        raise ConfigError(f"rollout.max_prompt_length={cap}: there are prompts of {longest} tokens")
    total = cap + config.rollout.max_new_tokens
    for role, arch in archs.items():
        if total > arch.max_position:
            raise ConfigError(
                f"{_source(config, role)}: it has {arch.max_position} positions, but "
                f"rollout.max_prompt_length + rollout.max_new_tokens = {total}: lower one of them "
                "(or raise model.max_position of a model that is made here)"
            )


def architectures(config: Config) -> dict[Role, Architecture]:
    """Of each role: read from its HF directory, else that of the model it starts from."""
    actor = _read("actor.path", config.actor.path) or config.model
    reward_model = _read("reward_model.path", config.reward_model.path) or actor
    critic_source = reward_model if config.critic.init == "reward_model" else actor
    scalar = {"tie_embeddings": False}  # a scalar head is never the embedding
    return {
        "actor": actor,
        "reference": _read("reference.path", config.reference.path) or actor,
        "reward_model": replace(reward_model, **scalar),
        "critic": replace(_read("critic.path", config.critic.path) or critic_source, **scalar),
    }


def _read(key: str, path: str) -> Architecture | None:
    if not path:
        return None
    with refusing(f"{key}={path!r}"):
        return read_architecture(Path(path))


def check_score_head(config: Config) -> None:
    """Refuse a reward model that no stage trains and that has no head to score with."""
    path = config.reward_model.path
    if not path or "reward_model" in config.stages:
        return
    with refusing(f"reward_model.path={path!r}"):
        if not has_score_head(path):
            raise ValueError(
                "a plain language model, without score.weight: give a reward model (a "
                "...ForSequenceClassification with one label), or train this one: add reward_model "
                "to stages"
            )


def has_score_head(path: str | Path) -> bool:
    """Whether a Hugging Face directory holds a model with a scalar head. Reads no weights."""
    return HEAD_NAMES["scalar"]["head/kernel"] in find_tensors(path)


@contextlib.contextmanager
def refusing(key: str) -> Iterator[None]:
    """Errors about a model or mesh inside become ConfigErrors that name `key`."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(f"{key}: {error}") from error


def _source(config: Config, role: Role) -> str:
    path = getattr(config, role).path
    return f"{role}.path={path!r}" if path else "model"


def check_claim(config: Config, workdir: Path, *, resume: bool) -> None:
    """Refuse to write over another run, and on resume settings that would change its numbers."""
    path = workdir / CLAIM
    settings = flatten(asdict(config))
    if path.exists():
        if not resume:
            raise ConfigError(
                f"--workdir={workdir}: holds a run already: add --resume to go on with it, or name "
                "another directory"
            )
        before = read_settings(path)
        for key in sorted(before.keys() | settings.keys()):
            old, new = before.get(key), settings.get(key)
            if old != new and key not in MAY_CHANGE:
                raise ConfigError(
                    f"{key}={new!r}: the run in {workdir} has {old!r}; resume with that, or start "
                    "in another --workdir"
                )


def claim(config: Config, workdir: Path, *, resume: bool) -> None:
    """Make `workdir` the directory of this run. Raises ConfigError as `check_claim`."""
    check_claim(config, workdir, resume=resume)
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / CLAIM
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(flatten(asdict(config)), indent=1) + "\n")
    partial.replace(path)


def read_run_config(workdir: Path) -> Config:
    """The settings of the run in `workdir`. Raises ConfigError where there is none."""
    path = workdir / CLAIM
    if not path.is_file():
        raise ConfigError(f"--workdir={workdir}: {path.name} is missing: name a run's directory")
    return read_config(unflatten(read_settings(path)))


def read_settings(path: Path) -> dict[str, Any]:
    """The flat settings in a run's config.json. Raises ConfigError for one that is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: unreadable ({error}): put it back from a copy, or use a new --workdir"
        ) from error


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys with JSON values."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested settings: what `flatten` undoes."""
    settings: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = key.split(".")
        group = settings
        for part in groups:
            group = group.setdefault(part, {})
        group[name] = value
    return settings
