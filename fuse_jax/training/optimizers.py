"""AdamW from an OptimizerConfig: schedule, decoupled weight decay, and the clip norm beside it.

The clip is not part of the optax chain: a step needs the norm before the clip anyway (to log it and
to see that a gradient is not finite), so it is taken once, in training/state.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fuse_jax.config import OptimizerConfig, PPOConfig


class Optimizer(NamedTuple):
    """An optax transform, the learning rate as a function of updates done, and the clip norm."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule
    max_grad_norm: float


def make_optimizer(config: OptimizerConfig, total_steps: int) -> Optimizer:
    """AdamW (arXiv 1711.05101) as `config` says, its schedule ending at update `total_steps`.

    `eps` is added outside the root, and is a key because Adam turns a gradient difference of 1e-8
    into a full step where the true gradient is 0. Norm scales and biases do not decay.
    """
    schedule = make_schedule(config, total_steps)
    adam: dict[str, Any] = {"b1": config.b1, "b2": config.b2, "eps": config.eps}
    if config.weight_decay:
        transform = optax.adamw(schedule, weight_decay=config.weight_decay, mask=decay_mask, **adam)
    else:
        transform = optax.adam(schedule, **adam)
    return Optimizer(transform, schedule, config.max_grad_norm)


def decay_mask(params: Any) -> Any:
    """True for kernels and embeddings, False for norm scales and biases (by name: leaves stack)."""

    def decays(path: Any, leaf: Any) -> bool:
        del leaf
        return path[-1].key not in ("scale", "bias")

    return jax.tree_util.tree_map_with_path(decays, params)


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate of the update after `count` others, float32.

        lr · min(1, (count + 1) / warmup) · decay((count - warmup) / (total - 1 - warmup))

    warmup is `warmup_fraction` of `total_steps`, rounded, and never all of them. decay falls from 1
    to `final_fraction`, which the last of `total_steps` updates gets, along a half cosine or a
    line, or stays 1. `total_steps` counts optimiser updates, not rollouts.

    Raises:
      ValueError: fewer than one step.
    """
    final = config.final_fraction
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1")
    warmup = min(round(config.warmup_fraction * total_steps), total_steps - 1)

    def schedule(count: Any) -> Array:
        done = jnp.asarray(count, jnp.float32)
        rate = jnp.float32(config.learning_rate)
        if warmup:
            rate = rate * jnp.minimum(1.0, (done + 1) / warmup)
        progress = jnp.clip((done - warmup) / max(1, total_steps - 1 - warmup), 0.0, 1.0)
        if config.schedule == "cosine":
            rate = rate * (final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))
        elif config.schedule == "linear":
            rate = rate * (1 - (1 - final) * progress)
        return rate

    return schedule


def planned_updates(config: PPOConfig) -> dict[str, int]:
    """Optimiser updates of actor and critic over a whole PPO run, to size their schedules.

    The actor misses the critic's warm-up. What is skipped or stopped early is not known beforehand.
    """
    each = config.epochs * config.minibatches
    trained = max(0, config.iterations - config.critic_warmup)
    return {"actor": max(1, trained * each), "critic": config.iterations * each}
