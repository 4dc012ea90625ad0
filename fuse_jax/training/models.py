"""Where each model of a run comes from: an HF directory, another model, or random numbers.

What a model takes from another is shared, not copied: whoever trains it copies (`create_state`),
and nothing else writes into parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import jax

from fuse_jax.data.tokenizer import Vocabulary
from fuse_jax.models import transformer
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.compute_copy import compute_copy
from fuse_jax.models.hf import load_params, save_params
from fuse_jax.models.transformer import Params
from fuse_jax.placement.sharding import parameter_specs
from fuse_jax.training.context import INIT_ACTOR, Role, Run, has_score_head, refusing

HEADS = {"actor": "lm", "reference": "lm", "critic": "scalar", "reward_model": "scalar"}


def shapes(run: Run, role: Role) -> Any:
    """Shapes and dtypes of the parameters of `role`."""
    arch, head = run.archs[role], HEADS[role]
    return jax.eval_shape(lambda: transformer.init(arch, jax.random.key(0), head=head))  # type: ignore[arg-type]


def shardings(run: Run, role: Role) -> Any:
    """Where they lie."""
    return parameter_specs(run.archs[role], shapes(run, role), run.mesh)


def load(run: Run, role: Role, path: str) -> Params:
    """Parameters of `role` from an HF directory, float32, straight into their shardings."""
    head: Any = HEADS[role]
    with refusing(f"{role}.path={path!r}"):
        return load_params(Path(path), run.archs[role], shardings(run, role), head=head)


def load_scored(run: Run, role: Role, path: str) -> Params:
    """A critic or reward model that is to be trained: a plain language model is taken as its trunk,
    with a head that gives 0 everywhere."""
    if has_score_head(path):
        return load(run, role, path)
    run.say(f"{role}.path={path!r} is a plain language model: its trunk gets a fresh scalar head")
    places = {name: place for name, place in shardings(run, role).items() if name != "head"}
    with refusing(f"{role}.path={path!r}"):
        trunk = load_params(Path(path), run.archs[role], places, head="none")
    return {**trunk, "head": transformer.scalar_head(run.archs[role])}


def initial_actor(run: Run) -> Params:
    """The actor before any training here."""
    if run.config.actor.path:
        return load(run, "actor", run.config.actor.path)
    arch = run.archs["actor"]
    init = jax.jit(lambda key: transformer.init(arch, key), out_shardings=shardings(run, "actor"))
    return init(run.key(INIT_ACTOR))


def initial_reference(run: Run, actor: Params) -> Params:
    """The frozen reference: its own directory, or the actor before PPO."""
    path = run.config.reference.path
    return load(run, "reference", path) if path else actor


def frozen(run: Run, params: Params) -> Params:
    """`params` of a model that is only read from here on: in the compute dtype, bit-equal results.

    Under bfloat16 reference and reward model so take half the memory.
    """
    return compute_copy(params, run.dtype)


def initial_reward_model(run: Run, actor: Params) -> Params:
    """The reward model before its training: its own directory, or the actor's trunk, scoring 0."""
    path = run.config.reward_model.path
    return load_scored(run, "reward_model", path) if path else with_scalar_head(run, actor)


def initial_critic(
    run: Run, actor: Params, reward_model: Params | None, mean: float, deviation: float
) -> Params:
    """The critic: its own directory, the reward model in units of treated scores, or the actor.

    A reward model taken as critic has its head rescaled to (score - mean) / deviation, so that it
    starts by predicting what PPO is given.
    """
    config = run.config.critic
    if config.path:
        return load_scored(run, "critic", config.path)
    if config.init == "actor" or reward_model is None:
        return with_scalar_head(run, actor)
    head = reward_model["head"]
    scaled = {"kernel": head["kernel"] / deviation, "bias": (head["bias"] - mean) / deviation}
    return {**reward_model, "head": scaled}


def with_scalar_head(run: Run, trunk: Params) -> Params:
    """`trunk` with a head that gives 0 everywhere."""
    return {**trunk, "head": transformer.scalar_head(run.archs["actor"])}


def write(
    directory: Path,
    role: Role,
    arch: Architecture,
    params: Params,
    *,
    dtype: Literal["float32", "bfloat16"],
    vocabulary: Vocabulary,
    tokenizer_path: str,
) -> None:
    """A model as a Hugging Face directory, with the tokenizer's files if it has any."""
    stops = list(vocabulary.stop_token_ids)
    save_params(
        directory,
        arch,
        params,
        dtype=dtype,
        head="scalar" if HEADS[role] == "scalar" else "lm",
        source=tokenizer_path or None,
        token_ids={
            "eos_token_id": stops if len(stops) > 1 else stops[0],
            "pad_token_id": vocabulary.pad_token_id,
        },
    )
