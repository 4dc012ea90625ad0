"""Which column of which sample is due, dispatched or done: the table hand-off works from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

GENERATING, DUE, DISPATCHED, DONE = range(4)


class Readiness:
    """A state for every (sample, column), and the due ones in order of arrival.

    Samples are rows, by their position in the run. A sample's bucket is known once it is finished.
    Every change checks the state it starts from, so nothing is scored twice or lost unnoticed.
    """

    def __init__(self, samples: int, columns: Sequence[str], buckets: int) -> None:
        self._states = {column: [GENERATING] * samples for column in columns}
        self._left = samples * len(columns)  # columns of samples that are not there
        self._waiting = 0  # columns due
        self._due: dict[str, list[deque[int]]] = {
            column: [deque() for _ in range(buckets)] for column in columns
        }
        # How many are in each, kept beside them because it is asked before every batch.
        self._counts = {column: [0] * buckets for column in columns}
        # Side by side, for `finish`: while it works, a device may wait for its next chunk.
        self._tables = [(c, self._states[c], self._due[c], self._counts[c]) for c in columns]

    @property
    def done(self) -> bool:
        """Whether every column of every sample is there."""
        return not self._left

    @property
    def any_due(self) -> bool:
        """Whether any column of any sample is due."""
        return self._waiting > 0

    def finish(self, sample: int, bucket: int) -> None:
        """A sample is generated: all its columns are due."""
        for column, states, due, counts in self._tables:
            if states[sample] != GENERATING:
                raise _wrong(column, sample, states, GENERATING, DUE)
            states[sample] = DUE
            due[bucket].append(sample)
            counts[bucket] += 1
        self._waiting += len(self._tables)

    @property
    def due(self) -> Mapping[str, Sequence[int]]:
        """Column -> how many samples of each bucket are due. A view: it changes with the table."""
        return self._counts

    def take(self, column: str, bucket: int, rows: int) -> tuple[int, ...]:
        """The first `rows` samples due there (or all there are): they are dispatched now."""
        queue = self._due[column][bucket]
        taken = tuple(queue.popleft() for _ in range(min(rows, len(queue))))
        self._move(taken, column, DUE, DISPATCHED)
        self._counts[column][bucket] -= len(taken)
        self._waiting -= len(taken)
        return taken

    def give_back(self, column: str, bucket: int, samples: Sequence[int]) -> None:
        """What `take` gave could not be scored: due again, before all others."""
        self._move(samples, column, DISPATCHED, DUE)
        self._due[column][bucket].extendleft(reversed(samples))
        self._counts[column][bucket] += len(samples)
        self._waiting += len(samples)

    def complete(self, column: str, samples: Sequence[int]) -> None:
        """Their column is there."""
        self._move(samples, column, DISPATCHED, DONE)
        self._left -= len(samples)

    def _move(self, samples: Iterable[int], column: str, before: int, after: int) -> None:
        states = self._states[column]
        for sample in samples:
            if states[sample] != before:
                raise _wrong(column, sample, states, before, after)
            states[sample] = after


def _wrong(column: str, sample: int, states: list[int], before: int, after: int) -> RuntimeError:
    names = ("generating", "due", "dispatched", "done")
    return RuntimeError(
        f"{column} of sample {sample} should be {names[before]} before it is {names[after]}, but "
        f"it is {names[states[sample]]}"
    )
