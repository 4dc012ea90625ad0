"""One model's pipeline as data that checks itself, the units of times and memory, and the errors
of a problem. What it all means is on the page of `problem.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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


def per_stage(
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
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number: Any = value  # compared as it is: a whole number may be too large for a float
    return 0 <= number <= maximum


def whole_number(value: Any, low: int, key: str) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not low <= int(value) <= 100_000:
        raise CountError(f"{key}={value!r}: must be a whole number from {low} to 100000")
    return int(value)


# Keep every sum of ticks or quanta far inside int64.
_LONGEST_MS = 1e9
LARGEST_ACTIVATION = 1e11


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
            put(self, key, whole_number(getattr(self, key), low, key))
        total = self.stages * self.chunks
        for key in ("forward", "backward"):
            put(self, key, per_stage(getattr(self, key), total, key, TimeError, _LONGEST_MS))
        if self.weight_grad is not None:
            times = per_stage(self.weight_grad, total, "weight_grad", TimeError, _LONGEST_MS)
            put(self, "weight_grad", times)
        held = per_stage(self.activation, total, "activation", ActivationError, LARGEST_ACTIVATION)
        put(self, "activation", held)
        for key in ("first_extra", "last_extra"):
            value = getattr(self, key)
            if hasattr(value, "__len__") and len(value) == 2:
                value = (*value, 0.0)
            put(self, key, per_stage(value, 3, key, TimeError, _LONGEST_MS))
        for key in ("lag", "tail"):
            put(self, key, per_stage(getattr(self, key), 1, key, TimeError, _LONGEST_MS)[0])
        if self.direction not in ("up", "down"):
            raise LayoutError(f"direction={self.direction!r}: must be 'up' or 'down'")
        if self.placement not in ("loop", "vee"):
            raise LayoutError(f"placement={self.placement!r}: must be 'loop' or 'vee'")
        if self.lengths is not None:
            put(self, "lengths", self._checked_lengths(self.lengths))

    def _checked_lengths(self, lengths: Any) -> tuple[Any, ...]:
        """[M] or [K, M] as tuples of finite non-negative floats; K is checked by the problem."""
        if isinstance(lengths, (str, bytes, Mapping)) or not hasattr(lengths, "__len__"):
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
