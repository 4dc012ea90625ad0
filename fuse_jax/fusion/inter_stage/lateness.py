"""Which instances are likely to finish last, looked at no more often than streaming needs."""

from __future__ import annotations

from collections.abc import Callable

from fuse_jax.fusion.inter_stage import policy
from fuse_jax.fusion.inter_stage.costs import Costs, Geometry
from fuse_jax.fusion.inter_stage.lengths import LengthHistory

# An instance of which no sample has finished is looked at anew after so many chunks. Its prospects
# move slowly then: simulated iterations take no longer than if it was looked at after every one.
CHUNKS = 4


class Lateness:
    """Of each instance, the samples expected to outlast all instances (see `may_stream`)."""

    def __init__(self, geometry: Geometry, history: LengthHistory, costs: Costs) -> None:
        self.geometry, self.history, self.costs = geometry, history, costs
        self._ends = [0.0] * geometry.instances
        self._late = [0.0] * geometry.instances
        self._chunks = [0] * geometry.instances  # read since it was noted
        # Instances to be looked at, and when they were last read or changed.
        self._noted = dict.fromkeys(range(geometry.instances), 0.0)

    def read(self, index: int, now: float, finished: bool) -> None:
        """A chunk of an instance was read at `now` (ms), and maybe finished samples."""
        self._chunks[index] += 1
        if finished or self._chunks[index] >= CHUNKS:
            self.note(index, now)

    def note(self, index: int, now: float) -> None:
        """Look at an instance when it is asked for: it has got or lost samples."""
        self._noted[index] = now
        self._chunks[index] = 0

    def of_all(self, ages_of: Callable[[int], policy.Ages]) -> list[float]:
        """Expected samples of each instance that end after all other instances do."""
        if not self._noted:
            return self._late
        history, costs = self.history, self.costs
        noted = [(index, now, ages_of(index)) for index, now in self._noted.items()]
        for index, now, ages in noted:
            self._ends[index] = policy.expected_end(now, ages, history, self.geometry, costs)
        horizon = max(self._ends)
        for index, now, ages in noted:
            self._late[index] = policy.outlasting(now, ages, history, costs, horizon)
        self._noted.clear()
        return self._late
