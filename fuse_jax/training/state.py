"""What an optimiser step reads and writes, for any number of models, and that step itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jax.sharding import Mesh

from fuse_jax.models.architecture import Architecture
from fuse_jax.placement.sharding import parameter_specs, replicated
from fuse_jax.training.optimizers import Optimizer


class GivenUp(RuntimeError):
    """Training that cannot go on; the message says what to mend."""


@struct.dataclass
class TrainState:
    """Per model ('actor', 'critic', 'reward_model'): float32 params, optimiser state, counts.

    updates: int32, optimiser updates made. skipped: int32, updates left out because the gradient
    was not finite. Each model counts its own.
    """

    params: dict[str, Any]
    opt_state: dict[str, Any]
    updates: dict[str, Array]
    skipped: dict[str, Array]


def create_state(
    params: Mapping[str, Any],
    optimizers: Mapping[str, Optimizer],
    archs: Mapping[str, Architecture],
    mesh: Mesh,
) -> TrainState:
    """A fresh state on `mesh`, sharded by the path rules of placement/sharding.py.

    Everything is copied: the state is donated to each step, and a reference model that shared its
    buffers would be overwritten or lost.
    """

    def fresh(params: dict[str, Any]) -> TrainState:
        params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
        return TrainState(
            params=params,
            opt_state={n: optimizers[n].transform.init(p) for n, p in params.items()},
            updates={n: jnp.zeros((), jnp.int32) for n in params},
            skipped={n: jnp.zeros((), jnp.int32) for n in params},
        )

    params = dict(params)
    shardings = state_shardings(jax.eval_shape(fresh, params), archs, mesh)
    return jax.jit(fresh, out_shardings=shardings)(jax.device_put(params, shardings.params))


def state_shardings(state: Any, archs: Mapping[str, Architecture], mesh: Mesh) -> Any:
    """Tree of NamedSharding for a TrainState or its shapes: moments lie where their params do."""
    counts: Any = dict.fromkeys(state.params, replicated(mesh))
    return TrainState(
        params={n: parameter_specs(archs[n], p, mesh) for n, p in state.params.items()},
        opt_state={n: parameter_specs(archs[n], o, mesh) for n, o in state.opt_state.items()},
        updates=counts,
        skipped=dict(counts),
    )


class CompiledStep:
    """`step(state, batch) -> (state, metrics)`, compiled once: its shapes are those of the run.

    The state is donated and kept in its shardings on `mesh`.
    """

    def __init__(
        self,
        step: Callable[[TrainState, Any], tuple[TrainState, dict[str, Array]]],
        archs: Mapping[str, Architecture],
        mesh: Mesh,
    ) -> None:
        self._step, self._archs, self._mesh = step, archs, mesh
        self._executable: Any = None

    def precompile(self, state: TrainState, batch: Any) -> None:
        """Compile for arrays (or shapes with shardings) like these, if that was not done yet."""
        if self._executable is None:
            shardings = (state_shardings(state, self._archs, self._mesh), replicated(self._mesh))
            jitted = jax.jit(self._step, donate_argnums=0, out_shardings=shardings)
            self._executable = jitted.lower(state, batch).compile()

    def text(self) -> str:
        """The compiled program, as XLA prints it. Raises RuntimeError before `precompile`."""
        if self._executable is None:
            raise RuntimeError("not compiled yet: call precompile first")
        return self._executable.as_text()

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        self.precompile(state, batch)
        return self._executable(state, batch)


def apply_gradients(
    state: TrainState, grads: Mapping[str, Any], optimizers: Mapping[str, Optimizer]
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser update of each model in `grads`; the others keep every bit.

    A model's gradient is scaled down to its `max_grad_norm` (over the whole model, after all
    reductions). If its norm is not finite, that model's params and optimiser state keep every bit
    and `skipped` counts one. Metrics, float32: `<model>_grad_norm` (before the clip),
    `<model>_learning_rate`, `<model>_skipped` (0 or 1).
    """
    params, opt_state = dict(state.params), dict(state.opt_state)
    updates, skipped = dict(state.updates), dict(state.skipped)
    metrics = {}
    for name, gradient in grads.items():
        optimizer = optimizers[name]
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(norm)
        gradient = clip(gradient, norm, optimizer.max_grad_norm)
        step, moments = optimizer.transform.update(gradient, opt_state[name], params[name])
        moved = jax.tree.map(_add, params[name], step)
        params[name] = _choose(finite, moved, params[name])
        opt_state[name] = _choose(finite, moments, opt_state[name])
        metrics[f"{name}_grad_norm"] = norm
        metrics[f"{name}_learning_rate"] = optimizer.schedule(updates[name])
        metrics[f"{name}_skipped"] = 1.0 - finite.astype(jnp.float32)
        updates[name] = updates[name] + finite.astype(jnp.int32)
        skipped[name] = skipped[name] + 1 - finite.astype(jnp.int32)
    return TrainState(params, opt_state, updates, skipped), metrics


def check_skipped(state: TrainState, limit: int) -> None:
    """Raise GivenUp if a model left out more than `limit` updates. Waits for the device."""
    for name, skipped in state.skipped.items():
        if int(skipped) > limit:
            raise GivenUp(
                f"{name}: {int(skipped)} updates had a gradient that is not finite, more than "
                f"ppo.max_skipped_updates={limit}: lower the learning rate, or look at the data "
                "and at the scores in samples.jsonl"
            )


def clip(gradient: Any, norm: Array, max_norm: float) -> Any:
    """`gradient` scaled to `max_norm` where its `norm` is above it; 0 = never."""
    if not max_norm:
        return gradient
    scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)
    return jax.tree.map(lambda g: g * scale, gradient)


def _add(param: Array, step: Array) -> Array:
    # Adding a step of 0 would still turn -0.0 into 0.0: with lr = 0 no bit may change.
    return jnp.where(step == 0, param, param + step)


def _choose(new_wanted: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(new_wanted, n, o), new, old)
