"""The controller of inter-stage fusion: it drives all instances and waits for none of them.

One loop in one thread sleeps until something has ended on a device, takes what is there, and
dispatches what is due: chunks, moves, weights, scoring batches. What to do is decided by `policy`,
which the simulator asks too (RLHFuse, arXiv 2409.13221 §4); this module only carries it out.

An instance whose step raises is given up: its samples start again from their prompts on the others,
where they come out the same, because a sample's randomness is its own.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from absl import logging

from fuse_jax.fusion.inter_stage import migration, policy
from fuse_jax.fusion.inter_stage.instances import Instance, geometry_of
from fuse_jax.fusion.inter_stage.job import SHARES, Counts, Job, Outcome
from fuse_jax.fusion.inter_stage.lane import Lane, Unit
from fuse_jax.fusion.inter_stage.lateness import Lateness
from fuse_jax.fusion.inter_stage.readiness import Readiness
from fuse_jax.fusion.inter_stage.stopwatch import Stopwatch
from fuse_jax.fusion.inter_stage.timeline import Timeline
from fuse_jax.rollout.batcher import Progress, Request, check_request
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Scored
from fuse_jax.scoring.reward_function import RewardResult

# The controller wakes when something ends on a device. Of rewards nobody tells it: once they are
# all that is missing it asks so often, in seconds.
REWARD_PAUSE, LONG_PAUSE = 2e-3, 1.0
T = TypeVar("T")


def run(instances: Sequence[Instance], job: Job) -> Outcome:
    """Generate and score every request of `job`.

    Raises:
      ValueError: two requests with one sample id, or one that the geometry cannot hold.
      RuntimeError: every instance failed; the first failure is its cause.
    """
    return Controller(instances, job).run()


@contextlib.contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Within, garbage is looked for among new objects only.

    Going through all that JAX and a training run hold takes 0.1 to 0.2 s, which no instance is
    supplied meanwhile. Whoever has frozen objects already keeps them as they are.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Controller:
    """See the module. Made for one `run`."""

    def __init__(self, instances: Sequence[Instance], job: Job) -> None:
        self.job, self.plan = job, job.plan
        self.geometry = geometry_of(instances)
        job.costs.check(self.geometry)
        requests = job.requests
        self.position = {request.sample_id: i for i, request in enumerate(requests)}
        if len(self.position) != len(requests):
            raise ValueError("two requests have the same sample id")
        for request in requests:  # here, where it is the caller's error and no instance's
            check_request(instances[0].engine, request)
        self.room = policy.admission(job.costs, self.geometry)
        self.timeline = Timeline(len(instances))
        self.watch = Stopwatch(*SHARES)
        self._asleep = self.watch.on("asleep")
        shared = (job.models, job.seed_key, self.timeline, self.watch)
        self.lanes = [Lane(one, *shared) for one in instances]
        buckets = len(self.geometry.buckets)
        self.table = Readiness(len(requests), self.geometry.columns, buckets)
        self.samples: list[Sample | None] = [None] * len(requests)
        self.scored = [Scored() for _ in requests]
        self.rewards: dict[int, RewardResult] = {}
        self.unasked: list[Sample] = []  # finished, but no reward asked for yet
        self.counts = Counts()
        self.backlog: deque[Request] = deque()
        self.unfinished = len(requests)
        self.kept: tuple[int, ...] | None = None  # None: not migrated yet
        self.batches = policy.scoring_batches(self.geometry, job.costs)
        self.lateness = Lateness(self.geometry, job.history, job.costs)
        # To be asked what is due there: an instance of which something has ended; all at the start
        # and after a failure. Nothing changes for the others, but that more may be due to score.
        self._changed: dict[int, Lane] = {}
        self._idle: set[int] = set()  # instances that have nothing to generate
        self._more_due = False
        self._cause: Exception | None = None

    # ------------------------------------------------------------------ the loop

    def run(self) -> Outcome:
        """Until every sample has every column, and its reward where a function gives it."""
        try:
            with old_objects_left_alone(), self.watch.on("scheduler"):
                self._drive()
            total = self.timeline.now()
            self.timeline.wait()
        finally:
            self.timeline.close()
        counts = self.counts
        counts.seconds = self.watch.seconds
        counts.watching_cpu_s = self.timeline.watching_cpu_s
        samples = [sample for sample in self.samples if sample is not None]
        return Outcome(
            samples=samples,
            scored=self.scored,
            rewards=self._rewards_in_order(samples),
            rollout=[lane.stats for lane in self.lanes],
            timeline=self.timeline,
            counts=self.counts,
            generation_ms=max((one.at for one in self.timeline.finishes), default=0.0),
            total_ms=total,
        )

    def _drive(self) -> None:
        self._assign()
        self._ask_all()
        self._decide()
        while not self._complete():
            if not self.timeline.open:
                self._check_going_on()
            with self._asleep:
                self.timeline.pause(LONG_PAUSE if self.timeline.open else REWARD_PAUSE)
            self._read()
            self._decide()

    def _complete(self) -> bool:
        if self.unfinished or not self.table.done:
            return False
        return self.job.text_rewards is None or len(self.rewards) == len(self.samples)

    def _read(self) -> None:
        """Take what has become ready."""
        self.counts.looks += 1
        for index, kind in self.timeline.settle():
            lane = self.lanes[index]
            if not lane.alive:
                continue  # reading what came before has ended the instance
            if kind == "decode":
                self._read_chunk(lane)
            elif kind == "score":
                self._read_score(lane)
            elif kind == "weights":
                lane.weights_here = True
        self._poll_rewards()

    def _ask_all(self) -> None:
        self._changed = dict(enumerate(self.lanes))

    def _decide(self) -> None:
        """Dispatch what is due after something has changed.

        A step that fails gives up its instance, and handing on its samples may end others. So every
        loop asks who is alive before each step, and all are asked again: something may be due on an
        instance that had its turn.
        """
        while self._changed:
            lanes, self._changed = list(self._changed.values()), {}
            self._dispatch_due(lanes)

    def _dispatch_due(self, lanes: Sequence[Lane]) -> None:
        """Dispatch what is due on `lanes`; on the others it is as it was when they were asked."""
        if self._migrate():
            lanes = self.lanes
        while leaving := [one for one in lanes if one.leaving and one.alive and not one.in_flight]:
            for lane in leaving:
                self._depart(lane)
            lanes = self.lanes  # any may have been given samples
        for lane in lanes:
            self._launch(lane)
            if not lane.has_weights and lane.alive:
                self._attempt(lane, lane.bring_weights)
        if self._more_due:
            self._more_due, lanes = False, self.lanes
        self._offer(lanes)

    def _alive(self) -> list[Lane]:
        return [lane for lane in self.lanes if lane.alive]

    def _check_going_on(self) -> None:
        """A controller that waits for nothing would wait for ever."""
        asked = len(self.rewards) < len(self.samples) and not self.unasked
        if self.job.text_rewards and asked and not self.unfinished and self.table.done:
            return
        due = sum(map(sum, self.table.due.values()))
        raise RuntimeError(
            f"nothing is in flight, but {self.unfinished} samples are unfinished and "
            f"{due} columns are due: the plan {self.plan} cannot go on"
        )

    # ------------------------------------------------------------------ generation

    def _assign(self) -> None:
        requests = self.job.requests
        predicted = self.job.predicted or [1.0] * len(requests)
        shares, backlog = policy.assign(
            predicted, len(self.lanes), self.geometry.slots, pack=self.plan.pack
        )
        self.backlog.extend(requests[i] for i in backlog)
        for lane, share in zip(self.lanes, shares, strict=True):
            if share:
                self._submit(lane, [requests[i] for i in share])

    def _read_chunk(self, lane: Lane) -> None:
        finished = self._attempt(lane, lane.collect)
        if finished is None:
            return
        for sample in finished:
            self._finish(sample, lane)
        if self.plan.stream:
            self.lateness.read(lane.index, self.timeline.now(), bool(finished))
        self._changed[lane.index] = lane

    def _finish(self, sample: Sample, lane: Lane) -> None:
        """A sample is generated: its columns are due now, and so is its reward."""
        position = self.position[sample.sample_id]
        self.timeline.finished(sample.sample_id, lane.index)
        self.table.finish(position, lane.instance.scorer.bucket_of(sample))
        self._more_due = True
        self.samples[position] = sample
        self.unfinished -= 1
        self.unasked.append(sample)
        if self.job.text_rewards is None:
            self.unasked.clear()
        elif self.plan.handoff or not self.unfinished:
            self.job.text_rewards.submit(self.unasked)
            self.unasked.clear()

    def _launch(self, lane: Lane) -> None:
        """Keep an instance that generates supplied with prompts and chunks."""
        if not lane.alive:
            return
        if self.backlog and not lane.leaving and lane.wants_more():
            rows = policy.pull(lane.free_slots, len(self.backlog), self.geometry)
            taken = [self.backlog.popleft() for _ in range(rows)]
            if self._done(lane, lane.submit, taken):
                self._note(lane)
            else:
                self.backlog.extendleft(reversed(self._unheld(taken)))
        while lane.alive and lane.may_launch(len(self.backlog)):
            self._stream(lane)
            if not lane.alive or not self._attempt(lane, lane.launch):
                break
        if lane.unfinished or not lane.alive:
            self._idle.discard(lane.index)
            return
        self._idle.add(lane.index)
        if not self.backlog:  # else it may be asked again, and would have to make its cache anew
            lane.retire()

    # ------------------------------------------------------------------ migration

    def _migrate(self) -> bool:
        """Decide the one migration of the iteration if it is due now."""
        if self.kept is not None or self.unfinished > self.plan.threshold:
            return False
        generating = [lane for lane in self._alive() if lane.unfinished]
        due = policy.must_migrate(
            self.plan, self.room, self.unfinished, len(generating), len(self.backlog)
        )
        if due:
            self.kept = policy.choose_kept(self.plan, self._views(), self.job.history)
            for lane in generating:
                lane.leaving = lane.index not in self.kept
        return due

    def _depart(self, source: Lane) -> None:
        """All chunks of a leaving instance are read: its samples move to the kept ones."""
        source.leaving = False
        kept = [index for index in self.kept or () if self.lanes[index].alive]
        if not kept or not source.unfinished:
            return
        try:
            moves = policy.moves_from(
                source.index,
                self._views(),
                kept,
                plan=self.plan,
                geometry=self.geometry,
                costs=self.job.costs,
            )
        except ValueError as error:  # after a failure there may be too few slots: it stays
            logging.warning("instance %d keeps its samples: %s", source.index, error)
            return
        for move in moves:
            self._move(source, move)
        source.retire()

    def _move(self, source: Lane, move: policy.Move) -> None:
        target = self.lanes[move.destination]
        if not source.alive or not target.alive:
            return  # its failure has dealt with the samples; or they stay where they are
        taken = self._attempt(source, migration.take, source, move)
        if taken is None:
            return
        rows, samples = taken
        if not self._done(target, migration.give, target, move, rows, samples):
            held = self._unheld([one.request for one in samples])
            self._restart([Progress(request) for request in held])
            return
        self._note(source)
        self._note(target)
        if move.way is not None:
            self.counts.migrated += len(samples)

    def _views(self) -> list[policy.InstanceView]:
        return [lane.view() for lane in self.lanes]

    # ------------------------------------------------------------------ scoring

    def _offer(self, lanes: Sequence[Lane]) -> None:
        """Batches to those of `lanes` that may score, the least supplied first."""
        if not self._idle or not self.table.any_due:
            return
        if not policy.may_score(self.plan, self.unfinished, len(self.backlog)):
            return
        free = [
            lane
            for lane in lanes
            if lane.index in self._idle and lane.batches < policy.BATCHES_IN_FLIGHT and lane.alive
        ]
        for depth in range(policy.BATCHES_IN_FLIGHT):
            for lane in free:
                if lane.batches != depth or not lane.alive:
                    continue
                picked = self._next_batch(part_filled=depth == 0)
                if picked is None:
                    break
                self._score(lane, *picked)

    def _next_batch(self, *, part_filled: bool) -> tuple[str, int] | None:
        if not self.table.any_due:
            return None
        return policy.next_batch(self.table.due, self.batches, part_filled=part_filled)

    def _stream(self, lane: Lane) -> None:
        """A full batch before the next chunk, if others will be later than this instance anyway."""
        if not self.plan.stream or not self.table.any_due:
            return
        if lane.batches or not lane.weights_here:  # the next chunk would wait for them too
            return
        late = self.lateness.of_all(lambda index: self.lanes[index].ages())
        if not policy.may_stream(late, lane.index):
            return
        picked = self._next_batch(part_filled=False)
        if picked is not None:
            self._score(lane, *picked)

    def _note(self, lane: Lane) -> None:
        """An instance has got or lost samples, which streaming wants to know."""
        if self.plan.stream:
            self.lateness.note(lane.index, self.timeline.now())

    def _score(self, lane: Lane, column: str, bucket: int) -> None:
        rows = self.geometry.buckets[bucket].rows
        positions = self.table.take(column, bucket, rows)
        samples = [sample for i in positions if (sample := self.samples[i]) is not None]
        unit = Unit(column, bucket, positions)
        self.counts.batches += 1
        self.counts.padding_rows += rows - len(positions)
        self._attempt(lane, lane.score, unit, samples)

    def _read_score(self, lane: Lane) -> None:
        self._changed[lane.index] = lane
        unit = lane.oldest_unit
        scored = [self.scored[position] for position in unit.samples]
        if self._done(lane, lane.read_oldest, scored):
            self.table.complete(unit.column, unit.samples)
            lane.scored()

    # ------------------------------------------------------------------ rewards

    def _poll_rewards(self) -> None:
        if self.job.text_rewards is not None:
            for sample_id, result in self.job.text_rewards.function.poll().items():
                self.rewards[self.position[sample_id]] = result  # type: ignore[index]

    def _rewards_in_order(self, samples: Sequence[Sample]) -> list[RewardResult] | None:
        if self.job.text_rewards is None:
            return None
        return [self.rewards[position] for position in range(len(samples))]

    # ------------------------------------------------------------------ failure

    def _attempt(self, lane: Lane, step: Callable[..., T], *args: Any) -> T | None:
        """`step(*args)` of `lane`; if it raises, the instance is given up: None."""
        try:
            return step(*args)
        except Exception as error:  # what a broken device raises is of no one kind
            self._give_up(lane, error)
            return None

    def _done(self, lane: Lane, step: Callable[..., None], *args: Any) -> bool:
        """`_attempt` of a step without a result: whether it worked."""
        self._attempt(lane, step, *args)
        return lane.alive

    def _give_up(self, lane: Lane, error: Exception) -> None:
        logging.exception("instance %d failed and is given up", lane.index)
        self._cause = self._cause or error
        self.counts.failed += 1
        self._ask_all()
        unfinished, units = lane.abandon()
        for unit in units:
            self.table.give_back(unit.column, unit.bucket, unit.samples)
        self._more_due = True
        if not self._alive():
            raise RuntimeError(
                f"all {len(self.lanes)} instances failed, with {self.unfinished} samples unfinished"
            ) from self._cause
        self._idle.discard(lane.index)
        self._note(lane)
        self._restart(unfinished)

    def _restart(self, lost: Sequence[Progress]) -> None:
        """Samples of a failed instance start again on the least loaded of the others."""
        self.counts.rerun += len(lost)
        history = self.job.history
        open_ = [lane for lane in self._alive() if not lane.leaving] or self._alive()
        loads = [
            policy.remaining_work(lane.view(), history) if lane in open_ else float("inf")
            for lane in self.lanes
        ]
        expected = [history.remaining(0, one.request.max_new_tokens) for one in lost]
        targets = policy.dispatch(expected, len(self.lanes), loads)
        for one, target in zip(lost, targets, strict=True):
            self._submit(self.lanes[target], [one.request])

    def _submit(self, lane: Lane, requests: list[Request]) -> None:
        """Queue requests on `lane`; if it fails, on another."""
        self._idle.discard(lane.index)
        self._note(lane)
        if not lane.alive or not self._done(lane, lane.submit, requests):
            self._restart([Progress(request) for request in self._unheld(requests)])

    def _unheld(self, requests: Sequence[Request]) -> list[Request]:
        """Those that no instance has: of a step that failed part-way, the others got some."""
        views = [lane.view() for lane in self._alive()]
        held = {one.sample_id for view in views for one in (*view.live, *view.waiting)}
        return [request for request in requests if request.sample_id not in held]
