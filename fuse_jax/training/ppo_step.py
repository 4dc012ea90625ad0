"""One PPO update as a pure function, and how it is compiled for a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh

from fuse_jax.placement.sharding import batch_sharding
from fuse_jax.training.gradients import BOTH, HyperParameters, serial_gradients
from fuse_jax.training.minibatch import Minibatch, minibatch_shardings
from fuse_jax.training.optimizers import Optimizer, make_optimizer
from fuse_jax.training.state import CompiledStep, TrainState, apply_gradients, create_state

Metrics = dict[str, Array]
Gradients = Callable[[dict[str, Any], Minibatch], tuple[dict[str, Any], Metrics]]


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


class Step:
    """`ppo_step` compiled for a mesh: call it with a state, which is donated, and a mini-batch."""

    def __init__(self, compiled: CompiledStep, mesh: Mesh) -> None:
        self._compiled, self._mesh = compiled, mesh

    def _placed(self, minibatch: Minibatch) -> Minibatch:
        """On the mesh, without waiting for it."""
        return jax.device_put(minibatch, minibatch_shardings(minibatch, self._mesh))

    def precompile(self, state: TrainState, minibatch: Minibatch) -> None:
        """Compile now; every mini-batch of a run has the shapes of this one."""
        self._compiled.precompile(state, self._placed(minibatch))

    def text(self) -> str:
        """The compiled program, as XLA prints it."""
        return self._compiled.text()

    def wait(self) -> None:
        """Nothing: an error shows when the metrics are read."""

    def __call__(self, state: TrainState, minibatch: Minibatch) -> tuple[TrainState, Metrics]:
        return self._compiled(state, self._placed(minibatch))


def make_step(
    mesh: Mesh,
    hp: HyperParameters,
    *,
    gradients: Callable[..., tuple[dict[str, Any], Metrics]] = serial_gradients,
    train: tuple[str, ...] = BOTH,
) -> Step:
    """`ppo_step` for `mesh`: state donated, params by path rules, rows over (data, fsdp).

    `train` is static: the step that leaves the actor alone (critic warm-up, KL early stop) is a
    second executable that holds none of the actor's work.
    """
    hp = replace(hp, rows=batch_sharding(mesh))
    bound = partial(ppo_step, hp=hp, gradients=partial(gradients, hp=hp, train=train))
    return Step(CompiledStep(bound, {"actor": hp.actor, "critic": hp.critic}, mesh), mesh)
