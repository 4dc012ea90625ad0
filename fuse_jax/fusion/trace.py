"""Timelines in the Chrome trace format: open the file at https://ui.perfetto.dev or chrome://tracing.

A trace has groups (drawn as processes), rows inside a group (threads) and counters (curves).
Rows and groups appear in the order of their first use. All times are in ms.
"""

import json
from collections.abc import Mapping
from pathlib import Path


class Trace:
    """Collects spans and counters and writes them as one JSON object."""

    def __init__(self) -> None:
        self._events: list[dict] = []
        self._groups: dict[str, int] = {}
        self._rows: dict[tuple[str, str], int] = {}

    def span(self, group: str, row: str, name: str, start: float, end: float, **args) -> None:
        """One box from `start` to `end` (ms). Perfetto colours by `name`, digits left out."""
        if end < start:
            raise ValueError(f"span {name!r} on {row!r} ends at {end} ms, before its start {start}")
        pid, tid = self._group_id(group), self._row_id(group, row)
        self._events.append(
            {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": _us(start)}
            | {"dur": round(_us(end) - _us(start), 3), "args": args}
        )

    def counter(self, group: str, name: str, time: float, values: Mapping[str, float]) -> None:
        """The curve `name` steps to `values` (series name -> number, stacked) at `time` (ms)."""
        self._events.append(
            {"ph": "C", "pid": self._group_id(group), "name": name, "ts": _us(time)}
            | {"args": dict(values)}
        )

    def to_dict(self) -> dict:
        """`{"traceEvents": [...]}` with the naming records first."""
        return {"traceEvents": [*self._names(), *self._events], "displayTimeUnit": "ms"}

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), separators=(",", ":")))

    def _names(self) -> list[dict]:
        names = []
        for group, pid in self._groups.items():
            names.append(_metadata("process_name", pid, 0, name=group))
            names.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for (group, row), tid in self._rows.items():
            pid = self._groups[group]
            names.append(_metadata("thread_name", pid, tid, name=row))
            names.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
        return names

    def _group_id(self, group: str) -> int:
        return self._groups.setdefault(group, len(self._groups) + 1)

    def _row_id(self, group: str, row: str) -> int:
        return self._rows.setdefault((group, row), len(self._rows) + 1)


def _us(ms: float) -> float:
    # The format counts in µs. Three decimals (ns) are kept, so that a box that starts where the
    # one before it ends does so in the file as well.
    return round(ms * 1000.0, 3)


def _metadata(record: str, pid: int, tid: int, **args) -> dict:
    return {"ph": "M", "name": record, "pid": pid, "tid": tid, "args": args}
