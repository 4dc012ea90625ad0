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
from numbers import Integral, Real
from typing import Any, Literal

TICKS_PER_MS = 1000
QUANTA_PER_UNIT = 1_000_000
MODELS = ("actor", "critic")
KINDS = ("F", "B", "W")


class ProblemError(ValueError):
    """A problem that cannot be scheduled; the message names the key, the value and the fix."""


class UnknownKeyError(ProblemError):
    """A key that no problem has, or a missing one."""


class CountError(ProblemError):
    """stages, micro_batches, chunks or devices is not a whole number in its range."""


class DivisibilityError(ProblemError):
    """The devices are not a multiple of a model's stages: K1 N1 = K2 N2 = D has no whole K."""


class TimeError(ProblemError):
    """A time is negative, not finite, or given for the wrong number of stages."""


class ActivationError(ProblemError):
    """An activation size is negative, not finite, or given for the wrong number of stages."""


class LengthsError(ProblemError):
    """Micro-batch lengths are negative, not finite, or of the wrong shape."""


class LayoutError(ProblemError):
    """direction or placement is not one of the known words."""


class MemoryCapError(ProblemError):
    """The memory cap cannot hold a single micro-batch of one model on one device."""


def to_ticks(ms: float) -> int:
    """Round a time in ms to ticks (1/1000 ms), half up."""
    return math.floor(ms * TICKS_PER_MS + 0.5)


def to_quanta(amount: float) -> int:
    """Round an amount of memory to quanta (10^-6 of the caller's unit), half up."""
    return math.floor(amount * QUANTA_PER_UNIT + 0.5)


def _per_stage(
    value: Any, count: int, key: str, error: type[ProblemError], maximum: float
) -> tuple[float, ...]:
    """One finite, non-negative number a stage, from a number or a sequence of `count` numbers."""
    values = [value] * count if isinstance(value, Real) else value
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
        raise error(f"{key}={value!r}: give one number, or one for each of the {count} stages")
    if len(values) != count:
        raise error(
            f"{key} has {len(values)} values, but the model has {count} stages (stages x chunks)"
        )
    for number in values:
        if not _is_number(number, maximum):
            raise error(f"{key}={number!r}: must be a finite number from 0 to {maximum:g}")
    return tuple(float(number) for number in values)


def _is_number(value: Any, maximum: float) -> bool:
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and 0 <= float(value) <= maximum


def _count(value: Any, low: int, key: str) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not low <= int(value) <= 100_000:
        raise CountError(f"{key}={value!r}: must be a whole number from {low} to 100000")
    return int(value)


# Keep every sum of ticks or quanta far inside int64.
_LONGEST_MS = 1e9
_LARGEST_ACTIVATION = 1e11


@dataclass(frozen=True)
class Pipeline:
    """One model's pipeline; per-stage values are a number (all stages) or one per stage [S], S =
    stages x chunks.

    Args:
      stages: N, devices that one replica spans.
      micro_batches: M of each replica; 0 leaves the model out.
      forward, backward: ms of F and B a stage, for a micro-batch of length 1.
      activation: memory held by one micro-batch in flight on a stage (any unit, the cap's unit).
      weight_grad: ms of W a stage; None when the backward is not split.
      direction: "up" or "down" over the device numbers.
      lag: ms from the end of a task to the earliest start of its successor on another device.
      first_extra, last_extra: (F, B, W) ms more on the first and on the last stage.
      tail: ms after the last backward of a stage before the step is over.
      chunks: v, stages of this model on each device.
      placement: "loop" (interleaved) or "vee" (the odd chunks run back).
      lengths: [K, M], or [M] for all replicas alike; relative length of each micro-batch (default
        1).
    """

    stages: int
    micro_batches: int
    forward: Any
    backward: Any
    activation: Any = 0.0
    weight_grad: Any = None
    direction: Literal["up", "down"] = "up"
    lag: float = 0.0
    first_extra: Any = (0.0, 0.0, 0.0)
    last_extra: Any = (0.0, 0.0, 0.0)
    tail: float = 0.0
    chunks: int = 1
    placement: Literal["loop", "vee"] = "loop"
    lengths: Any = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        for key, low in (("stages", 1), ("micro_batches", 0), ("chunks", 1)):
            put(self, key, _count(getattr(self, key), low, key))
        total = self.stages * self.chunks
        for key in ("forward", "backward"):
            put(self, key, _per_stage(getattr(self, key), total, key, TimeError, _LONGEST_MS))
        if self.weight_grad is not None:
            times = _per_stage(self.weight_grad, total, "weight_grad", TimeError, _LONGEST_MS)
            put(self, "weight_grad", times)
        held = _per_stage(
            self.activation, total, "activation", ActivationError, _LARGEST_ACTIVATION
        )
        put(self, "activation", held)
        for key in ("first_extra", "last_extra"):
            value = getattr(self, key)
            if hasattr(value, "__len__") and len(value) == 2:
                value = (*value, 0.0)
            put(self, key, _per_stage(value, 3, key, TimeError, _LONGEST_MS))
        for key in ("lag", "tail"):
            put(self, key, _per_stage(getattr(self, key), 1, key, TimeError, _LONGEST_MS)[0])
        if self.direction not in ("up", "down"):
            raise LayoutError(f"direction={self.direction!r}: must be 'up' or 'down'")
        if self.placement not in ("loop", "vee"):
            raise LayoutError(f"placement={self.placement!r}: must be 'loop' or 'vee'")
        if self.lengths is not None:
            put(self, "lengths", self._checked_lengths(self.lengths))

    def _checked_lengths(self, lengths: Any) -> tuple[Any, ...]:
        """[M] or [K, M] as tuples of finite non-negative floats; K is checked by the problem."""
        if isinstance(lengths, (str, bytes)) or not hasattr(lengths, "__len__"):
            raise LengthsError(f"lengths={lengths!r}: give [M] or [K, M] numbers")
        rows = lengths if len(lengths) and hasattr(lengths[0], "__len__") else [lengths]
        checked = []
        for row in rows:
            if not hasattr(row, "__len__") or len(row) != self.micro_batches:
                raise LengthsError(
                    f"lengths row {row!r}: must have micro_batches={self.micro_batches} numbers"
                )
            for value in row:
                if not _is_number(value, 1e6):
                    raise LengthsError(f"lengths={value!r}: must be a finite number from 0 to 1e6")
            checked.append(tuple(float(value) for value in row))
        return tuple(checked) if rows is lengths else checked[0]

    @property
    def split(self) -> bool:
        """Whether the backward is split in B and W."""
        return self.weight_grad is not None

    @property
    def total_stages(self) -> int:
        """S = stages x chunks."""
        return self.stages * self.chunks

    @property
    def kinds(self) -> tuple[str, ...]:
        """The task kinds of this model: F, B and, when split, W."""
        return KINDS if self.split else KINDS[:2]

    def stage_times(self) -> list[tuple[float, ...]]:
        """ms a stage for each kind (F, B[, W]), extras included, for a micro-batch of length 1."""
        table = []
        for kind, times in enumerate((self.forward, self.backward, self.weight_grad)):
            if times is None:
                continue
            row = list(times)
            row[0] += self.first_extra[kind]
            row[-1] += self.last_extra[kind]
            table.append(tuple(row))
        return table

    def position(self, stage: int) -> int:
        """Position 0..N-1 of a stage on its replica's devices, before the direction is applied."""
        chunk, offset = divmod(stage, self.stages)
        return self.stages - 1 - offset if self.placement == "vee" and chunk % 2 else offset

    def device(self, replica: int, stage: int) -> int:
        """Device that runs `stage` of `replica`."""
        position = self.position(stage)
        if self.direction == "down":
            position = self.stages - 1 - position
        return replica * self.stages + position

    def replica_lengths(self, replica: int) -> tuple[float, ...]:
        """Lengths of the micro-batches of one replica [M]."""
        if self.lengths is None:
            return (1.0,) * self.micro_batches
        if self.lengths and isinstance(self.lengths[0], tuple):
            return self.lengths[replica]
        return self.lengths


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
        object.__setattr__(self, "devices", _count(self.devices or common, 1, "devices"))
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
            _per_stage(self.memory_cap, 1, "memory_cap", MemoryCapError, _LARGEST_ACTIVATION)
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
