"""One instance in the simulator: a device working off a queue, its slots, and what is seen of it.

The device is always ahead of what the controller knows: `steps` are dispatched, `steps_read` read.
"""

from __future__ import annotations

import heapq
from collections import deque

from fuse_jax.fusion.inter_stage.costs import DecodeTable
from fuse_jax.fusion.inter_stage.policy import Ages, InstanceView, Unfinished
from fuse_jax.fusion.inter_stage.workload import Workload


class SimulatedInstance:
    """See the module. `had[i]`: tokens of its response that sample i has when it is prefilled."""

    def __init__(self, workload: Workload, decode: DecodeTable, had: list[int]) -> None:
        self.workload, self.decode, self.had = workload, decode, had
        self.free_at = 0.0  # when the device has done all that was dispatched
        self.steps = 0  # decode steps dispatched
        self.steps_read = 0
        self.live: list[tuple[int, int]] = []  # heap of (step it ends at, sample)
        self.joined: dict[int, tuple[int, int]] = {}  # slot holder -> (step, tokens it had then)
        self.waiting: deque[int] = deque()
        self.prefilled: deque[int] = deque()
        self.chunks = 0  # in flight
        self.batches = 0
        self.leaving = False
        self.weights_at: float | None = None
        self._offset = 0.0  # context of the longest (or mean) live slot, less `steps`

    @property
    def queued(self) -> int:
        """Samples without a slot."""
        return len(self.waiting) + len(self.prefilled)

    @property
    def unfinished(self) -> int:
        """As the controller sees it."""
        return len(self.joined) + self.queued

    def view(self) -> InstanceView:
        """What a policy may know."""
        prompts, cap = self.workload.prompts, self.workload.cap
        live = tuple(
            Unfinished(s, prompts[s], had + max(self.steps_read - step, 0), cap)
            for s, (step, had) in self.joined.items()
        )
        waiting = (*self.prefilled, *self.waiting)
        return InstanceView(
            live, tuple(Unfinished(s, prompts[s], self.had[s], cap) for s in waiting)
        )

    def ages(self) -> Ages:
        """What streaming may know."""
        prompts, read = self.workload.prompts, self.steps_read
        live = [had + max(read - step, 0) for step, had in self.joined.values()]
        queued = (*self.prefilled, *self.waiting)
        waiting = [self.had[sample] for sample in queued]
        ages, samples = (live, self.joined) if live else (waiting, queued)
        contexts = [prompts[sample] + age for sample, age in zip(samples, ages, strict=True)]
        return Ages(live, waiting, contexts, self.workload.cap)

    def occupy(self, earliest: float, ms: float) -> tuple[float, float]:
        """Queue `ms` of device time; returns its start and end."""
        start = max(earliest, self.free_at)
        self.free_at = start + ms
        return start, start + ms

    def join(self, sample: int, generated: int) -> None:
        """A sample that has `generated` tokens enters a slot, behind the dispatched chunks."""
        self.joined[sample] = (self.steps, generated)
        end = self.steps + self.workload.responses[sample] - generated
        heapq.heappush(self.live, (end, sample))
        self._measure()

    def decode_chunk(self, chunk: int) -> tuple[int, int, float, list[int]]:
        """Up to `chunk` steps, fewer if all slots are done before.

        Returns live slots, steps, ms, and the samples that are finished then.
        """
        finished = self._pop(self.steps)  # a response of one token is done before any step
        live = len(self.live)
        steps = min(chunk, max(end for end, _ in self.live) - self.steps) if live else 0
        context = self._offset + self.steps + steps / 2
        ms = steps * self.decode(live, context) if live else 0.0
        self.steps += steps
        finished += self._pop(self.steps)
        if len(self.live) < live:
            self._measure()
        return live, steps, ms, finished

    def clear(self) -> dict[int, int]:
        """All samples leave; returns the tokens that each of those in slots has. Nothing unread."""
        held = {s: had + self.steps - step for s, (step, had) in self.joined.items()}
        self.live, self.joined = [], {}
        self.waiting.clear()
        self.prefilled.clear()
        return held

    def _pop(self, step: int) -> list[int]:
        finished = []
        while self.live and self.live[0][0] <= step:
            finished.append(heapq.heappop(self.live)[1])
        return finished

    def _measure(self) -> None:
        """Contexts of live slots grow with the steps, so only their offset need be kept."""
        prompts, joined = self.workload.prompts, self.joined
        offsets = [prompts[s] + joined[s][1] - joined[s][0] for _, s in self.live]
        if offsets:
            longest = self.decode.statistic == "longest"
            self._offset = max(offsets) if longest else sum(offsets) / len(offsets)
