"""One instance at work in one iteration: its batcher, its weights, its scoring batches.

Nothing here waits for a device, decides what to do next, or knows of other instances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax

from fuse_jax.fusion.inter_stage.instances import Instance
from fuse_jax.fusion.inter_stage.policy import (
    CHUNKS_IN_FLIGHT,
    Ages,
    InstanceView,
    Unfinished,
)
from fuse_jax.fusion.inter_stage.stopwatch import Stopwatch, Timed
from fuse_jax.fusion.inter_stage.timeline import Timeline
from fuse_jax.placement.host import start_copies, to_host
from fuse_jax.rollout.batcher import Batcher, Progress, Request, RolloutStats
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Model, Role, Scored
from fuse_jax.scoring.scorer import Pending

ENGINE_CALLS = (
    "place_params",
    "init_decode_state",
    "prefill",
    "insert",
    "generate",
    "extract",
    "release",
    "place",
)  # those that may wait for devices


class Unit(NamedTuple):
    """One column of one scoring batch; `samples` are positions in the run."""

    column: Any
    bucket: int
    samples: tuple[int, ...]
    pending: Pending | None = None


class Lane:
    """See the module. `models` may be anywhere; they are brought in when asked for.

    `watch` runs for "dispatch" while a call dispatches to devices or reads from them, and for
    "host" while batcher and scorer do on the host what they would without a controller.
    """

    def __init__(
        self,
        instance: Instance,
        models: Mapping[Role, Model],
        seed_key: Any,
        timeline: Timeline,
        watch: Stopwatch,
    ) -> None:
        self.instance, self.index = instance, instance.index
        self.alive = True
        self.leaving = False  # its samples move away: nothing more is launched
        self.timeline, self._watch = timeline, watch
        self._dispatching, self._on_host = watch.on("dispatch"), watch.on("host")
        self.stats = RolloutStats()
        self._models, self._seed_key = models, seed_key
        self._weights: dict[Role, Model] | None = None
        self.weights_here = False  # and no longer on their way
        self._batcher: Batcher | None = None
        self._units: deque[Unit] = deque()

    # ------------------------------------------------------------------ generation

    @cached_property
    def _actor(self) -> Any:
        with self._dispatching:
            return self.instance.on_mesh("actor", self._models["actor"]).params

    @property
    def batcher(self) -> Batcher:
        """Made when first needed; its cache memory is free while there is nothing to generate."""
        if self._batcher is None:
            watch, name = self._watch, "dispatch"
            engine: Any = Timed(self.instance.engine, ENGINE_CALLS, watch, name)
            copies = watch.timed(name, start_copies), watch.timed(name, to_host)
            told = watch.timed("scheduler", self._dispatched)
            self._batcher = Batcher(engine, self._actor, self._seed_key, told, *copies)
            self._batcher.stats = self.stats
        return self._batcher

    def _dispatched(self, kind: str, array: jax.Array, rows: int) -> None:
        resumed = kind == "resume"
        name = "prefill" if resumed else ""
        self.timeline.dispatched(self.index, "move" if resumed else kind, array, rows, name)

    @property
    def unfinished(self) -> int:
        """Its samples not finished, as far as chunks have been read."""
        return 0 if self._batcher is None else self._batcher.unfinished

    @property
    def in_flight(self) -> int:
        """Chunks launched and not read."""
        return 0 if self._batcher is None else self._batcher.launched

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing unfinished."""
        live = 0 if self._batcher is None else len(self._batcher.live)
        return self.instance.engine.rollout.slots - live

    def wants_more(self) -> bool:
        """Whether it has a free slot and nothing that waits for one. Touches no device."""
        return self._batcher is None or (not self._batcher.waiting and self.free_slots > 0)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        batcher = self.batcher
        with self._on_host:
            batcher.submit(requests)

    def launch(self) -> bool:
        """Fill free slots and dispatch a chunk; False if there is nothing to generate."""
        with self._on_host:
            return self.batcher.launch()

    def collect(self) -> list[Sample]:
        """Samples that the oldest chunk finished. Waits unless the timeline says it has ended."""
        with self._on_host:
            return self.batcher.collect()

    def may_launch(self, backlog: int) -> bool:
        """Whether another chunk can usefully be launched now; `backlog` prompts have no instance.

        While prompts wait for a slot, a chunk is read before the next is launched.
        """
        batcher = self._batcher
        if batcher is None or self.leaving or batcher.launched >= CHUNKS_IN_FLIGHT:
            return False
        if batcher.launched and (backlog or batcher.waiting):
            return False
        return batcher.unfinished > 0

    def retire(self) -> None:
        """Give the cache memory back once nothing is left to generate."""
        if self._batcher is not None and not self._batcher.unfinished and not self.in_flight:
            self._batcher = None

    def view(self) -> InstanceView:
        """What a policy may know."""
        if self._batcher is None:
            return InstanceView((), (), self.alive)
        live = tuple(map(_unfinished, self._batcher.live.values()))
        waiting = tuple(map(_unfinished, self._batcher.queued))
        return InstanceView(live, waiting, self.alive)

    def ages(self) -> Ages:
        """What streaming may know."""
        batcher = self._batcher
        if batcher is None:
            return Ages([], [], [], 0)
        live, queued = list(batcher.live.values()), batcher.queued
        samples = live or queued
        return Ages(
            [one.generated for one in live],
            [one.generated for one in queued],
            [one.length for one in samples],
            samples[0].request.max_new_tokens if samples else 0,
        )

    # ------------------------------------------------------------------ scoring

    @property
    def has_weights(self) -> bool:
        """Whether they are here or on their way; work dispatched after them waits for them."""
        return self._weights is not None

    def bring_weights(self) -> None:
        """Start bringing in what scoring reads."""
        with self._dispatching:
            self._weights = self.instance.scoring_models(self._models)
        last = [jax.tree.leaves(model.params)[-1] for model in self._weights.values()]
        self.timeline.dispatched(self.index, "weights", last[-1], len(last))

    @property
    def batches(self) -> int:
        """Scoring batches dispatched and not read."""
        return len(self._units)

    def score(self, unit: Unit, samples: Sequence[Sample]) -> None:
        """Dispatch `unit`; `samples` are its samples."""
        self._units.append(unit)  # first, so that nothing is lost if the dispatch raises
        assert self._weights is not None
        scorer = self.instance.scorer
        with self._on_host:
            batch = scorer.lay_out(unit.bucket, samples)
        with self._dispatching:
            pending = scorer.dispatch(unit.column, batch, self._weights)
        self._units[-1] = unit._replace(pending=pending)
        ids = tuple(sample.sample_id for sample in samples)
        self.timeline.dispatched(
            self.index, "score", pending.arrays[-1], len(samples), unit.column, ids
        )

    @property
    def oldest_unit(self) -> Unit:
        """The oldest scoring batch; `scored` takes it off."""
        return self._units[0]

    def read_oldest(self, scored: Sequence[Scored]) -> None:
        """Put what the oldest scoring batch says of its samples into `scored`, one a sample.

        Waits unless the timeline says it has ended.
        """
        unit = self.oldest_unit
        assert unit.pending is not None
        with self._dispatching:
            arrays = to_host(unit.pending.arrays)
        with self._on_host:
            unit.pending._replace(arrays=arrays).write(scored)

    def scored(self) -> None:
        """The oldest scoring batch has been read."""
        self._units.popleft()

    # ------------------------------------------------------------------ failure

    def abandon(self) -> tuple[list[Progress], list[Unit]]:
        """It failed: what it had not finished, and the scoring batches that nobody read."""
        self.alive, self.leaving = False, False
        units, self._units = list(self._units), deque()
        unfinished: list[Progress] = []
        if self._batcher is not None:
            unfinished = [*self._batcher.live.values(), *self._batcher.withdraw()]
            self._batcher = None
        self.timeline.drop(self.index)
        return unfinished, units


def _unfinished(progress: Progress) -> Unfinished:
    request = progress.request
    return Unfinished(
        request.sample_id,
        len(request.prompt_tokens),
        progress.generated,
        request.max_new_tokens,
    )
