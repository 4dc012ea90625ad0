"""What changes from one PPO iteration to the next, and how a scored batch moves it on."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from fuse_jax.data import cursor as cursors
from fuse_jax.data.order import permutation
from fuse_jax.rl.kl import adaptive_kl_update
from fuse_jax.rl.moments import Moments, update_moments
from fuse_jax.training.context import Run
from fuse_jax.training.experience import (
    ScoredBatch,
    experience_metrics,
    make_experience,
    shape,
)
from fuse_jax.training.minibatch import Experience
from fuse_jax.training.state import TrainState

ORDER_SEED = 7  # keeps mini-batch order apart from the data's own shuffle


@dataclass
class Progress:
    """What is counted over a PPO run; saved with every checkpoint."""

    iteration: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    generated_tokens: int = 0
    excluded: int = 0
    early_stops: int = 0
    best_score: float | None = None
    best_iteration: int = 0
    stopped: str = ""

    def spend(self, what: str, since: float) -> float:
        """Add the seconds since `since` to `what`; returns the time now."""
        now = time.monotonic()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - since
        return now


@dataclass
class PPOState:
    """All that changes from one iteration to the next."""

    train: TrainState
    moments: Moments
    kl_coef: Any
    cursor: cursors.Cursor
    progress: Progress

    def arrays(self) -> dict[str, Any]:
        """The part of a checkpoint that is device arrays."""
        return {
            "train": self.train,
            "moments": self.moments._asdict(),
            "kl_coef": jnp.asarray(self.kl_coef, jnp.float32),
        }

    def host(self) -> dict[str, Any]:
        """The part that is JSON."""
        return {"cursor": self.cursor.to_dict(), "progress": asdict(self.progress)}


def shape_experience(
    run: Run, state: PPOState, batch: ScoredBatch
) -> tuple[Experience, dict[str, float]]:
    """Experience and metrics of a scored batch; `state`'s running moments move on."""
    config = run.config
    if config.reward.normalise == "running":
        state.moments = update_moments(
            state.moments, jnp.asarray(batch.scores), jnp.asarray(batch.valid)
        )
    count = len(batch.scores)
    order = np.arange(count)
    if config.reward.control == "shuffled":
        valid = np.flatnonzero(batch.valid)
        shuffled = permutation(len(valid), config.seed, ORDER_SEED + 1, state.progress.iteration)
        order[valid] = valid[shuffled]
    shaped = shape(
        batch,
        None if config.reward.normalise == "none" else state.moments,
        jnp.asarray(state.kl_coef),
        order,
        reward=config.reward,
        ppo=config.ppo,
    )
    values = experience_metrics(batch, shaped)
    values["kl_coef"] = float(state.kl_coef)
    return make_experience(batch, shaped), values


def move_kl_coef(run: Run, state: PPOState, observed_kl: float, samples: int) -> None:
    """After an iteration: the adaptive controller's next coefficient; a fixed one stays."""
    kl = run.config.ppo.kl
    if kl.controller == "adaptive":
        state.kl_coef = np.float32(
            adaptive_kl_update(
                state.kl_coef,
                observed_kl,
                target=kl.target,
                horizon=kl.horizon,
                n_samples=samples,
            )
        )
