"""The columns a scorer can fill, and which models each of them reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fuse_jax.models.architecture import Architecture
from fuse_jax.models.transformer import Params
from fuse_jax.samples import SequenceBatch
from fuse_jax.scoring import passes

Role = Literal["actor", "reference", "critic", "reward_model"]
Column = Literal["ref_log_probs", "log_probs", "full_kl", "values", "scores"]

# `full_kl` compares two models over the same positions, so it runs them in one pass.
ROLES: dict[Column, tuple[Role, ...]] = {
    "ref_log_probs": ("reference",),
    "log_probs": ("actor",),
    "full_kl": ("actor", "reference"),
    "values": ("critic",),
    "scores": ("reward_model",),
}


class Model(NamedTuple):
    """An architecture and its parameters (arrays where the pass is to run, or their shapes)."""

    arch: Architecture
    params: Params


@dataclass(frozen=True)
class PassOptions:
    """What all passes share. See `passes.log_prob_pass`.

    rows: sharding of activations over rows, set by the scorer for its mesh; None = left to XLA.
    """

    temperature: float = 1.0
    valid_vocab: int | None = None
    chunk: int = 0
    dtype: Any = jnp.float32
    rows: Any = None


@dataclass
class Scored:
    """What scoring found of one sample of n response tokens; None where it was not asked for.

    Arrays are float32 `[n]` on the host: `ref_log_probs` under the reference, `log_probs` under the
    actor, `full_kl` between them (nats), `values` of the state before each token. `last_value` is
    of the state after the last token, `score` the reward model's.
    """

    ref_log_probs: np.ndarray | None = None
    log_probs: np.ndarray | None = None
    full_kl: np.ndarray | None = None
    values: np.ndarray | None = None
    last_value: float | None = None
    score: float | None = None


def models_of(column: Column, models: Mapping[Role, Model]) -> tuple[Model, ...]:
    """The models that `column` reads. Raises KeyError naming the role that is missing."""
    missing = [role for role in ROLES[column] if role not in models]
    if missing:
        raise KeyError(
            f"column {column!r} needs the model of role {missing[0]!r}, got {sorted(models)}"
        )
    return tuple(models[role] for role in ROLES[column])


def run_column(
    column: Column,
    archs: Sequence[Architecture],
    params: Sequence[Params],
    batch: SequenceBatch,
    length: int,
    options: PassOptions,
) -> tuple[jax.Array, ...]:
    """The arrays of `column`: `([B, R],)`, for `values` `([B, R], [B])`, for `scores` `([B],)`."""
    compute: dict[str, Any] = {"dtype": options.dtype, "rows": options.rows}
    if column == "scores":
        return (passes.reward_pass(archs[0], params[0], batch, **compute),)
    if column == "values":
        return passes.value_pass(archs[0], params[0], batch, length=length, **compute)
    shared: dict[str, Any] = {
        **compute,
        "length": length,
        "temperature": options.temperature,
        "valid_vocab": options.valid_vocab,
        "chunk": options.chunk,
    }
    if column == "full_kl":
        pairs = archs[0], params[0], archs[1], params[1]
        return (passes.full_kl_pass(*pairs, batch, **shared),)
    return (passes.log_prob_pass(archs[0], params[0], batch, **shared),)


def write_column(
    column: Column, scored: Scored, arrays: tuple[np.ndarray, ...], row: int, n: int
) -> None:
    """Copy a sample's `row` of the host `arrays` of `column` into `scored`."""
    if column == "scores":
        scored.score = float(arrays[0][row])
        return
    # A copy: a view would keep the whole batch alive, and other samples with it.
    setattr(scored, column, arrays[0][row, :n].copy())
    if column == "values":
        scored.last_value = float(arrays[1][row])
