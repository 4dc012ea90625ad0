"""One PPO update as a pure function, and how it is compiled for a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh

from fuse_jax.training.gradients import BOTH, HyperParameters, serial_gradients
from fuse_jax.training.minibatch import Minibatch, minibatch_shardings
from fuse_jax.training.optimizers import Optimizer, make_optimizer
from fuse_jax.training.state import TrainState, apply_gradients, create_state, jit_step

Metrics = dict[str, Array]
Gradients = Callable[[dict[str, Any], Minibatch], tuple[dict[str, Any], Metrics]]
Step = Callable[[TrainState, Minibatch], tuple[TrainState, Metrics]]


def ppo_step(
    state: TrainState, minibatch: Minibatch, *, hp: HyperParameters, gradients: Gradients
) -> tuple[TrainState, Metrics]:
    """One update of the models that `gradients` gives a gradient of (arXiv 1707.06347).

    `gradients(state.params, minibatch)` returns gradients of the whole mini-batch, all reductions
    done; clip, skip of non-finite gradients and optimiser are per model (training/state.py).
    Metrics: those of `gradients` and of `apply_gradients`.
    """
    grads, metrics = gradients(state.params, minibatch)
    state, update_metrics = apply_gradients(state, grads, ppo_optimizers(hp))
    return state, {**metrics, **update_metrics}


def ppo_optimizers(hp: HyperParameters) -> dict[str, Optimizer]:
    """The optimisers of actor and critic."""
    actor, critic = hp.updates
    return {
        "actor": make_optimizer(hp.ppo.actor_optimizer, actor),
        "critic": make_optimizer(hp.ppo.critic_optimizer, critic),
    }


def create_ppo_state(params: dict[str, Any], hp: HyperParameters, mesh: Mesh) -> TrainState:
    """Fresh state of `{'actor': ..., 'critic': ...}` on `mesh`; copies, so nothing is aliased."""
    archs = {"actor": hp.actor, "critic": hp.critic}
    return create_state(params, ppo_optimizers(hp), archs, mesh)


def make_step(
    mesh: Mesh,
    hp: HyperParameters,
    *,
    gradients: Callable[..., tuple[dict[str, Any], Metrics]] = serial_gradients,
    train: tuple[str, ...] = BOTH,
) -> Step:
    """`ppo_step` for `mesh`, jitted: state donated, params by path rules, rows over (data, fsdp).

    `train` is static: the step that leaves the actor alone (critic warm-up, KL early stop) is a
    second executable that holds none of the actor's work. Give host mini-batches; they are put on
    the mesh first (without waiting for it).
    """
    bound = partial(ppo_step, hp=hp, gradients=partial(gradients, hp=hp, train=train))
    run = jit_step(bound, {"actor": hp.actor, "critic": hp.critic}, mesh)

    def step(state: TrainState, minibatch: Minibatch) -> tuple[TrainState, Metrics]:
        return run(state, jax.device_put(minibatch, minibatch_shardings(minibatch, mesh)))

    return step
