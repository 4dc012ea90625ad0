"""What is to be scheduled: two pipelines over the same devices, as data that checks itself.

Semantics (complete: a checker can be written from this page and `schedule.py` alone)
-------------------------------------------------------------------------------------
*Devices and replicas.* There are D devices, 0..D-1. A model whose pipeline spans N devices has K
= D/N replicas (RLHFuse's fusion factor: K_actor N_actor = K_critic N_critic = D). Replica k owns
devices kN .. kN+N-1. Every device therefore hosts exactly one replica of each model.

*Stages and chunks.* A model has S = N v stages, v = `chunks` (virtual stages; 1 for none). Stage g
belongs to chunk c = g // N and has offset s = g mod N. The position on the replica's devices is s
for `placement="loop"`; for `"vee"` it is s for even c and N-1-s for odd c. Direction "up" puts
position s on device kN + s, "down" on device kN + N-1-s. So a device hosts one stage of each
chunk.

*Tasks.* For each model, replica, stage g and micro-batch m < M there is one forward `F` and one
backward `B`; with a split backward (`weight_grad` given) also one `W`. `B` is then the gradient
with respect to the input only and `W` the gradient with respect to the weights; otherwise `B` is
both.

*Durations* in ms: (time of the stage + extras) x length of the micro-batch, rounded to a whole
number of ticks, floor(x * 1000 + 0.5), 1000 ticks a ms. `first_extra` / `last_extra` = (F, B, W)
ms are added on stage 0 / stage S-1 (both when S = 1). A length may be 0 (an empty micro-batch:
its tasks exist and take no time).

*Dependencies.* F(g, m) after F(g-1, m). B(S-1, m) after F(S-1, m); B(g, m) after B(g+1, m) (hence
after F(g, m)). W(g, m) after B(g, m). If producer and consumer are on different devices, the
consumer starts at least `lag` of that model after the producer's end. No other dependency;
replicas and models are independent.

*Order.* A device runs one task at a time, in its given order. Within a class (device, model,
chunk, kind) micro-batches run in index order 0..M-1: gradients are then summed in the same order
by every schedule. With equal lengths that loses nothing (exchange two equal micro-batches); with
unequal lengths it is a rule.

*Memory.* F(g, m) takes activation[g] x length[m] when it starts; it is given back at the end of
B(g, m), or of W(g, m) when the backward is split. On a device a release at the end of a task
comes before the next task takes. Amounts are rounded to whole quanta, floor(x * 10^6 + 0.5), a
million quanta a unit (bytes, GB, or any unit). `memory_cap` (same unit) holds on every device for
both models together.

*Makespan* = max over tasks that finish a stage's gradients (B, or W when split) of end + `tail`
of their model (gradient all-reduce: it does not occupy the device), and over all tasks of end.
Time starts at 0.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from fuse_jax.fusion.intra_stage.pipeline import (
    KINDS,
    LARGEST_ACTIVATION,
    MODELS,
    QUANTA_PER_UNIT,
    TICKS_PER_MS,
    ActivationError,
    CountError,
    DivisibilityError,
    LayoutError,
    LengthsError,
    MemoryCapError,
    Pipeline,
    ProblemError,
    TimeError,
    UnknownKeyError,
    per_stage,
    to_quanta,
    to_ticks,
    whole_number,
)

__all__ = [
    "KINDS",
    "MODELS",
    "QUANTA_PER_UNIT",
    "TICKS_PER_MS",
    "ActivationError",
    "CountError",
    "DivisibilityError",
    "LayoutError",
    "LengthsError",
    "MemoryCapError",
    "Pipeline",
    "Problem",
    "ProblemError",
    "TimeError",
    "UnknownKeyError",
    "to_quanta",
    "to_ticks",
]


@dataclass(frozen=True)
class Problem:
    """Actor and critic pipelines over the same devices; see the page above for the exact meaning.

    Args:
      actor, critic: the two pipelines; usually "up" and "down".
      devices: D; default the least common multiple of the two models' stages.
      memory_cap: most memory in flight on any device, both models together; None for no cap.
      name: a label, no part of the problem's identity.

    Raises:
      DivisibilityError: D is not a multiple of a model's stages.
      MemoryCapError: one micro-batch does not fit on some device.
      LengthsError, CountError: lengths for another number of replicas; nothing to schedule.
    """

    actor: Pipeline
    critic: Pipeline
    devices: int = 0
    memory_cap: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        common = math.lcm(self.actor.stages, self.critic.stages)
        object.__setattr__(self, "devices", whole_number(self.devices or common, 1, "devices"))
        for model, pipeline in zip(MODELS, self.pipelines):
            if self.devices % pipeline.stages:
                raise DivisibilityError(
                    f"devices={self.devices} is not a multiple of {model}.stages="
                    f"{pipeline.stages}: K x stages = devices needs a whole K; "
                    f"use a multiple of {common}"
                )
            lengths = pipeline.lengths
            nested = bool(lengths) and isinstance(lengths[0], tuple)
            if nested and len(lengths) != self.devices // pipeline.stages:
                raise LengthsError(
                    f"{model}.lengths has {len(lengths)} rows, but the model has "
                    f"{self.devices // pipeline.stages} replicas"
                )
        if not self.actor.micro_batches + self.critic.micro_batches:
            raise CountError("micro_batches is 0 for both models: nothing to schedule")
        if self.memory_cap is not None:
            if isinstance(self.memory_cap, Sequence):
                raise MemoryCapError(f"memory_cap={self.memory_cap!r}: give one number, or null")
            per_stage(self.memory_cap, 1, "memory_cap", MemoryCapError, LARGEST_ACTIVATION)
            self._check_cap(float(self.memory_cap))

    def _check_cap(self, cap: float) -> None:
        """A micro-batch holds all its chunks of a device at once, so that much must fit; it also
        suffices.
        """
        object.__setattr__(self, "memory_cap", cap)
        for model, pipeline in zip(MODELS, self.pipelines):
            for replica in range(self.devices // pipeline.stages):
                longest = max(pipeline.replica_lengths(replica), default=0.0)
                need: dict[int, int] = {}
                for stage, held in enumerate(pipeline.activation):
                    device = pipeline.device(replica, stage)
                    need[device] = need.get(device, 0) + to_quanta(held * longest)
                for device, amount in need.items():
                    if amount > to_quanta(cap):
                        raise MemoryCapError(
                            f"memory_cap={cap:g} cannot hold one micro-batch of {model} on device "
                            f"{device}, which needs {amount / QUANTA_PER_UNIT:g}: raise the cap"
                        )

    @property
    def pipelines(self) -> tuple[Pipeline, Pipeline]:
        """(actor, critic)."""
        return self.actor, self.critic

    @property
    def replicas(self) -> tuple[int, int]:
        """Fusion factors (K_actor, K_critic): K x stages = devices."""
        return self.devices // self.actor.stages, self.devices // self.critic.stages

    @property
    def tasks_per_device(self) -> int:
        """Tasks on each device; alike on all, for each hosts one replica of each model."""
        return sum(p.chunks * len(p.kinds) * p.micro_batches for p in self.pipelines)

    @property
    def has_chunks(self) -> bool:
        """Whether any model has virtual stages."""
        return self.actor.chunks > 1 or self.critic.chunks > 1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything but the name: equal problems have equal digests."""
        content = {key: value for key, value in self.to_dict().items() if key != "name"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; `from_dict` is its inverse."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for model in MODELS:
            plain[model] = {f.name: getattr(plain[model], f.name) for f in fields(Pipeline)}
        return plain

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Problem:
        """Build a problem from plain data with the keys of `Problem` and `Pipeline`.

        Raises UnknownKeyError on a key neither has or a required key that is missing, and every
        error of `Problem`. The critic's direction is "down" unless given.
        """
        _check_keys(content, cls, "problem", required=MODELS)
        pipelines = {}
        for model in MODELS:
            part = content[model]
            required = ("stages", "micro_batches", "forward", "backward")
            _check_keys(part, Pipeline, model, required)
            defaults = {"direction": "down"} if model == "critic" else {}
            try:
                pipelines[model] = Pipeline(**{**defaults, **part})
            except ProblemError as error:
                raise type(error)(f"{model}: {error}") from None
        rest = {key: value for key, value in content.items() if key not in MODELS}
        if rest.get("devices") is None:
            rest.pop("devices", None)
        return cls(**pipelines, **rest)

    def to_json(self) -> str:
        """JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """Inverse of `to_json`."""
        return cls.from_dict(json.loads(text))


def _check_keys(content: Any, cls: type, where: str, required: Sequence[str]) -> None:
    known = [f.name for f in fields(cls)]
    if not isinstance(content, Mapping):
        raise UnknownKeyError(f"{where}={content!r}: must be a mapping with keys {known}")
    for key in content:
        if key not in known:
            raise UnknownKeyError(f"{where} has no key {key!r}; known keys: {', '.join(known)}")
    for key in required:
        if key not in content:
            raise UnknownKeyError(f"{where} needs the key {key!r}")
