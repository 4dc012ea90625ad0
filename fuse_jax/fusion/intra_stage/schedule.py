"""A schedule is data: for each device, the order of its tasks. Checks, times, memory, CSV and
JSON.

A task is named (model, replica, kind, micro_batch) and, with virtual stages, its chunk; the
device's row then fixes its stage, for a device hosts one stage of each chunk of one replica. CSV
columns are `device,position,model,replica,kind,micro_batch,start,end` with a ninth, `chunk`, only
if a model of the problem has chunks > 1; rows are sorted by device, then position (0, 1, ... in
running order); start and end in ms. The rules a schedule must keep are on the page of
`problem.py`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fuse_jax.fusion.intra_stage.cost import Timing, evaluate, time_order
from fuse_jax.fusion.intra_stage.graph import Graph, build_graph
from fuse_jax.fusion.intra_stage.problem import (
    KINDS,
    MODELS,
    QUANTA_PER_UNIT,
    TICKS_PER_MS,
    Problem,
    to_quanta,
)

CSV_COLUMNS = ("device", "position", "model", "replica", "kind", "micro_batch", "start", "end")


class ScheduleError(ValueError):
    """A schedule that breaks its problem's rules, or text that is no schedule of it."""


class CsvError(ScheduleError):
    """CSV or JSON that does not describe a schedule of the problem; the message names the row."""


class Task(NamedTuple):
    """One task as the outside names it; `device` is where it runs."""

    device: int
    model: str
    replica: int
    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" chunk {self.chunk}" if self.chunk else ""
        what = f"{self.model}[{self.replica}] {self.kind}{self.micro_batch}{chunk}"
        return f"{what} on device {self.device}"


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    rule: "missing", "duplicate" or "foreign" (not a task of that device), "order" (micro-batches
      of a class out of index
    order), "deadlock" (the orders wait for each other) or "memory" (above the cap). tasks: the
    offenders.
    """

    rule: str
    message: str
    tasks: tuple[Task, ...]


def task_of(graph: Graph, task: int) -> Task:
    """Name of a task id."""
    return Task(
        int(graph.device[task]),
        MODELS[graph.model[task]],
        int(graph.replica[task]),
        KINDS[graph.kind[task]],
        int(graph.micro_batch[task]),
        int(graph.chunk[task]),
    )


@dataclass(frozen=True, eq=False)
class Schedule:
    """Order of the tasks on each device.

    Args:
      problem: what is scheduled.
      order: task ids of `build_graph(problem)`, int64 [D, L] (every device has the same number of
        tasks). Not checked here: `violations` or `check` do.
    """

    problem: Problem
    order: np.ndarray

    @cached_property
    def graph(self) -> Graph:
        """The problem's tasks as arrays; kept, for to find them means to hash the problem."""
        return build_graph(self.problem)

    def tasks(self, device: int) -> list[Task]:
        """Names of a device's tasks in running order."""
        return [task_of(self.graph, int(task)) for task in self.order[device]]

    # -- rules

    def violations(self) -> list[Violation]:
        """Every broken rule, the tasks named; memory and deadlock are looked for once the rows are
        complete.
        """
        found = [v for device in range(self.problem.devices) for v in self._row_violations(device)]
        if any(v.rule in ("missing", "duplicate", "foreign") for v in found):
            return found
        found += [
            v for device in range(self.problem.devices) for v in self._class_violations(device)
        ]
        return found + self._deadlock() + self._over_cap()

    def check(self) -> Schedule:
        """Return self, or raise ScheduleError naming the broken rules (the first five)."""
        found = self.violations()
        if found:
            raise ScheduleError(
                f"{len(found)} broken rules: " + "; ".join(v.message for v in found[:5])
            )
        return self

    def _row_violations(self, device: int) -> list[Violation]:
        row = self.order[device]
        expected = np.flatnonzero(self.graph.device == device)
        ids, counts = np.unique(row, return_counts=True)
        groups = (
            ("foreign", np.setdiff1d(ids, expected), "does not belong to"),
            ("duplicate", np.intersect1d(ids[counts > 1], expected), "stands more than once on"),
            ("missing", np.setdiff1d(expected, ids), "is missing on"),
        )
        return [
            Violation(rule, f"{name} {what} device {device}", (name,))
            for rule, tasks, what in groups
            for name in (task_of(self.graph, int(task)) for task in tasks)
        ]

    def _class_violations(self, device: int) -> list[Violation]:
        found, last = [], {}
        for task in self.order[device]:
            cls, index = int(self.graph.cls[task]), int(self.graph.micro_batch[task])
            before = last.get(cls)
            if before is not None and self.graph.micro_batch[before] > index:
                first, second = task_of(self.graph, before), task_of(self.graph, int(task))
                found.append(Violation("order", f"{second} runs after {first}", (first, second)))
            last[cls] = int(task)
        return found

    def _deadlock(self) -> list[Violation]:
        if self._ideal is not None:
            return []
        end = self._progress()
        stuck = [
            next(int(t) for t in row if end[t] < 0) for row in self.order if (end[row] < 0).any()
        ]
        names = tuple(task_of(self.graph, task) for task in stuck)
        waits = [
            f"{name} waits for {task_of(self.graph, int(self.graph.pred[task, 0]))}"
            for name, task in zip(names, stuck)
            if self.graph.pred[task, 0] >= 0 and end[self.graph.pred[task, 0]] < 0
        ]
        return [Violation("deadlock", "deadlock: " + ", ".join(waits), names)]

    def _progress(self) -> np.ndarray:
        """End of every task that can run before the deadlock, -1 for the others [n]."""
        start, end = np.zeros_like(self.graph.duration), np.zeros_like(self.graph.duration)
        evaluate(self.graph, self.order, start, end)
        return end

    def _over_cap(self) -> list[Violation]:
        cap = self.problem.memory_cap
        if cap is None:
            return []
        held = self.memory_profile()
        found = []
        for device in range(self.problem.devices):
            over = np.flatnonzero(held[device] > to_quanta(cap))
            if over.size:
                name = task_of(self.graph, int(self.order[device, over[0]]))
                peak = held[device].max() / QUANTA_PER_UNIT
                found.append(
                    Violation(
                        "memory", f"{name} exceeds memory_cap={cap:g} (peak {peak:g})", (name,)
                    )
                )
        return found

    # -- times and memory

    @cached_property
    def _ideal(self) -> Timing | None:
        return time_order(self.graph, self.order)

    def timing(self, cost_model: str = "ideal") -> Timing:
        """Start and end of every task in ticks, by task id, under a cost model of `cost.py`.

        Raises ScheduleError on a deadlock, TransportError when the transport cannot carry the
        schedule.
        """
        timing = self._ideal if cost_model == "ideal" else None
        timing = timing or time_order(self.graph, self.order, cost_model)
        if timing is None:
            raise ScheduleError(self._deadlock()[0].message)
        return timing

    def makespan(self, cost_model: str = "ideal") -> float:
        """Length of the step in ms."""
        return self.timing(cost_model).makespan / TICKS_PER_MS

    def memory_profile(self) -> np.ndarray:
        """Memory held while each position runs, quanta, int64 [D, L]: what earlier tasks hold plus
        its own.
        """
        take, give = self.graph.take[self.order], self.graph.give[self.order]
        held = np.cumsum(take, axis=1)
        held[:, 1:] -= np.cumsum(give, axis=1)[:, :-1]
        return held

    def peaks(self) -> np.ndarray:
        """Peak memory of each device in the problem's unit, float64 [D]."""
        return self.memory_profile().max(axis=1) / QUANTA_PER_UNIT

    @property
    def peak_memory(self) -> float:
        """Largest of `peaks`."""
        return float(self.peaks().max())

    def busy(self) -> float:
        """Share of device time spent in tasks, 0..1, of the ideal makespan; 1 - busy is the
        bubble.
        """
        total = self.timing().makespan * self.problem.devices
        return float(self.graph.duration.sum() / total) if total else 1.0

    # -- text

    def to_csv(self, cost_model: str = "ideal") -> str:
        """CSV text with the columns described at the top; times under `cost_model`."""
        timing = self.timing(cost_model)
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(CSV_COLUMNS + (("chunk",) if self.problem.has_chunks else ()))
        for device, row in enumerate(self.order):
            for position, task in enumerate(row):
                name = task_of(self.graph, int(task))
                cells = [device, position, name.model, name.replica, name.kind, name.micro_batch]
                cells += [_ms(int(timing.start[task])), _ms(int(timing.end[task]))]
                writer.writerow(cells + ([name.chunk] if self.problem.has_chunks else []))
        return out.getvalue()

    @classmethod
    def from_csv(cls, problem: Problem, text: str) -> Schedule:
        """Read an order back; start and end are not read (they follow from the order and a cost
        model).

        Raises CsvError on wrong columns, a malformed row, an unknown task or a position out of
        sequence.
        """
        expected = CSV_COLUMNS + (("chunk",) if problem.has_chunks else ())
        reader = csv.reader(io.StringIO(text))
        header = tuple(next(reader, ()))
        if header != expected:
            raise CsvError(f"columns are {','.join(header)}; must be {','.join(expected)}")
        rows: list[list[Task]] = [[] for _ in range(problem.devices)]
        for line, cells in enumerate(reader, start=2):
            if len(cells) != len(expected):
                raise CsvError(f"line {line}: {len(cells)} cells, must be {len(expected)}")
            try:
                device, position, replica, micro_batch = (int(cells[i]) for i in (0, 1, 3, 5))
                chunk = int(cells[8]) if problem.has_chunks else 0
            except ValueError as error:
                raise CsvError(f"line {line}: {error}") from None
            if not 0 <= device < problem.devices:
                raise CsvError(
                    f"line {line}: device {device} is not one of 0..{problem.devices - 1}"
                )
            if position != len(rows[device]):
                raise CsvError(
                    f"line {line}: position {position} on device {device}, "
                    f"must be {len(rows[device])}"
                )
            rows[device].append(Task(device, cells[2], replica, cells[4], micro_batch, chunk))
        return cls.from_tasks(problem, rows)

    @classmethod
    def from_tasks(cls, problem: Problem, rows: Sequence[Iterable[Task]]) -> Schedule:
        """Build from names, one row a device.

        Raises CsvError on a name the problem does not have on that device, or a row of another
        length than the device's tasks (the missing ones are named).
        """
        known = _ids_by_name(problem)
        order = np.full((problem.devices, problem.tasks_per_device), -1, np.int64)
        if len(rows) != problem.devices:
            raise CsvError(f"{len(rows)} device rows, must be {problem.devices}")
        for device, row in enumerate(rows):
            ids = []
            for task in row:
                if task not in known:
                    raise CsvError(f"{task} is not a task of the problem on that device")
                ids.append(known[task])
            if len(ids) != order.shape[1]:
                absent = [
                    str(name) for name, i in known.items() if name.device == device and i not in ids
                ]
                raise CsvError(
                    f"device {device} has {len(ids)} tasks, must be {order.shape[1]}; "
                    f"missing: {', '.join(absent[:5]) or 'none (some stand twice)'}"
                )
            order[device] = ids
        return cls(problem, order)

    def to_json(self, cost_model: str = "ideal") -> str:
        """JSON with the problem, the makespan in ms, the peak memory and the rows as in the CSV."""
        rows = [
            [[t.model, t.replica, t.kind, t.micro_batch, t.chunk] for t in self.tasks(device)]
            for device in range(self.problem.devices)
        ]
        content = {
            "problem": self.problem.to_dict(),
            "cost_model": cost_model,
            "makespan": self.makespan(cost_model),
            "peak_memory": self.peak_memory,
            "order": rows,
        }
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Inverse of `to_json`; raises CsvError or the problem's own errors."""
        content = json.loads(text)
        problem = Problem.from_dict(content["problem"])
        rows = [[Task(d, *cells) for cells in row] for d, row in enumerate(content["order"])]
        return cls.from_tasks(problem, rows)


def _ms(ticks: int) -> str:
    """Ticks as ms in the shortest exact decimal form."""
    whole, rest = divmod(ticks, TICKS_PER_MS)
    return f"{whole}.{rest:03d}".rstrip("0").rstrip(".")


def _ids_by_name(problem: Problem) -> dict[Task, int]:
    graph = build_graph(problem)
    return {task_of(graph, task): task for task in range(graph.duration.size)}
