"""What a run writes while it goes: metrics.jsonl, samples.jsonl and TensorBoard events.

A line is whole or absent to a reader: each is written and flushed at once, and a resumed run first
drops what the killed one wrote after its last checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter


class RunLog:
    """The three streams of one work directory."""

    def __init__(self, workdir: Path) -> None:
        workdir.mkdir(parents=True, exist_ok=True)
        self.metrics_path = workdir / "metrics.jsonl"
        self.samples_path = workdir / "samples.jsonl"
        self._tensorboard = workdir / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}
        self._dropped: dict[str, int] = {}  # first step of each stage that is written again

    def metrics(self, stage: str, step: int, values: dict[str, float]) -> None:
        """One line of metrics, and the same numbers as TensorBoard scalars, a run a stage."""
        finite = {name: _plain(value) for name, value in values.items()}
        _append(self.metrics_path, [{"stage": stage, "step": step, **finite}])
        if stage not in self._writers:
            again = self._dropped.get(stage)
            self._writers[stage] = SummaryWriter(str(self._tensorboard / stage), purge_step=again)
        for name, value in finite.items():
            if isinstance(value, float | int):
                self._writers[stage].add_scalar(name, value, step)

    def samples(self, rows: Iterable[dict[str, Any]]) -> None:
        """Lines of the sample table: stage, step, prompt, response, score."""
        _append(self.samples_path, rows)

    def drop(self, unwanted: Callable[[dict[str, Any]], bool]) -> None:
        """Remove lines (and a half-written last line) that a resumed run will write again."""
        for path in (self.metrics_path, self.samples_path):
            rows = []
            for row in read_lines(path):
                if not unwanted(row):
                    rows.append(row)
                else:
                    first = self._dropped.get(row["stage"], row["step"])
                    self._dropped[row["stage"]] = min(first, row["step"])
            temporary = path.with_suffix(".partial")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
            os.replace(temporary, path)

    def close(self) -> None:
        """Flush TensorBoard."""
        for writer in self._writers.values():
            writer.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole JSON lines of `path`; a last line cut by a kill is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().split("\n")[:-1]:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def _plain(value: Any) -> Any:
    """A JSON number; NaN and infinity become None, which JSON has."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("a") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")
        stream.flush()
