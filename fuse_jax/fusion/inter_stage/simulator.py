"""Generation and scoring of one iteration, event by event, without devices.

The controller here is the live one's double: it sees what a real one sees (chunks that were read,
not what the device has done since), and asks `policy` for every decision. A device is a queue: what
is dispatched to an instance runs in order, each dispatch as long as `Costs` says. Deterministic.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

from fuse_jax.buckets import bucket_of
from fuse_jax.fusion.inter_stage import policy
from fuse_jax.fusion.inter_stage.costs import Costs, Geometry
from fuse_jax.fusion.inter_stage.lateness import Lateness
from fuse_jax.fusion.inter_stage.lengths import LengthHistory
from fuse_jax.fusion.inter_stage.policy import InstanceView, Plan
from fuse_jax.fusion.inter_stage.simulated_instance import SimulatedInstance
from fuse_jax.fusion.inter_stage.spans import Span
from fuse_jax.fusion.inter_stage.workload import Outcome, Workload


def simulate(
    plan: Plan,
    geometry: Geometry,
    costs: Costs,
    workload: Workload,
    *,
    history: LengthHistory | None = None,
    record: bool = False,
) -> Outcome:
    """Run `workload` under `plan`.

    Args:
      history: what the controller knows of response lengths; decides which instances look busiest.
      record: keep `spans` (the timeline).

    Raises ValueError: a sample fits no bucket, or costs are missing.
    """
    costs.check(geometry)
    world = _World(plan, geometry, costs, workload, history or LengthHistory(), record)
    return world.run()


class _World:
    def __init__(
        self,
        plan: Plan,
        geometry: Geometry,
        costs: Costs,
        workload: Workload,
        history: LengthHistory,
        record: bool,
    ) -> None:
        self.plan, self.geometry, self.costs = plan, geometry, costs
        self.workload, self.history, self.record = workload, history, record
        self.room = policy.admission(costs, geometry)
        count, columns = len(workload.responses), geometry.columns
        self.bucket = [
            bucket_of(p + r, geometry.buckets)
            for p, r in zip(workload.prompts, workload.responses, strict=True)
        ]
        self.had = [0] * count  # tokens of its response that a sample has when it is prefilled
        self.ready = {column: [0] * len(geometry.buckets) for column in columns}
        self.due = {column: [deque() for _ in geometry.buckets] for column in columns}
        self.any_due = 0
        self.unfinished = count
        self.out = Outcome(
            finished_at=np.full(count, np.nan), scored_at=np.full((len(columns), count), np.nan)
        )
        self.events: list[tuple] = []
        self.number = 0
        self.instances = [
            SimulatedInstance(workload, costs.decode, self.had) for _ in range(geometry.instances)
        ]
        self.scorers: set[int] = set()
        self.batches = policy.scoring_batches(geometry, costs)
        self.lateness = Lateness(geometry, history, costs)
        self.score_spans: list[tuple[float, float]] = []

    # ------------------------------------------------------------------ the clock

    def run(self) -> Outcome:
        self._start()
        now = 0.0
        while self.events:
            now, _, what, index, payload = heapq.heappop(self.events)
            what(now, index, payload)
        if self.unfinished or self.any_due:
            raise AssertionError(f"{self.unfinished} unfinished, {self.any_due} due at the end")
        out = self.out
        out.total_ms = float(out.scored_at.max())
        out.generation_ms = float(out.finished_at.max())
        end = out.generation_ms
        out.scoring_ms = sum(stop - start for start, stop in self.score_spans)
        out.hidden_ms = sum(max(min(stop, end) - start, 0.0) for start, stop in self.score_spans)
        return out

    def _at(self, time: float, what, index: int, payload=None) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, what, index, payload))

    def _span(self, index: int, kind: str, when: tuple[float, float], count: int, name="") -> None:
        if self.record:
            self.out.spans.append(Span(index, kind, *when, count, name))

    # ------------------------------------------------------------------ generation

    def _start(self) -> None:
        predicted = self.workload.predicted or [1.0] * self.unfinished
        given, backlog = policy.assign(
            predicted, self.geometry.instances, self.geometry.slots, pack=self.plan.pack
        )
        self.backlog = deque(backlog)
        for index, prompts in enumerate(given):
            self.instances[index].waiting.extend(prompts)
        for index in range(self.geometry.instances):
            self._step(0.0, index)
        self._offer(0.0)

    def _step(self, now: float, index: int) -> None:
        """The controller turns to one instance: something of it has changed."""
        instance = self.instances[index]
        self._migrate(now)
        if instance.leaving and not instance.chunks:
            self._depart(now, index)
        if not instance.leaving:
            self._launch(now, index)
        if instance.weights_at is None:
            instance.weights_at = now + self.costs.weights_ms
            if self.costs.weights_ms:
                self._span(index, "weights", (now, instance.weights_at), 0)
        open_ = policy.may_score(self.plan, self.unfinished, len(self.backlog))
        if open_ and not instance.unfinished:
            self.scorers.add(index)
        else:
            self.scorers.discard(index)

    def _launch(self, now: float, index: int) -> None:
        """Keep an instance that generates supplied with prompts and chunks."""
        instance, free = self.instances[index], self.geometry.slots
        free -= len(instance.joined)
        if free and not instance.queued:
            for _ in range(policy.pull(free, len(self.backlog), self.geometry)):
                instance.waiting.append(self.backlog.popleft())
                self.lateness.note(index, now)
        while instance.unfinished:
            waits = instance.queued or self.backlog
            if instance.chunks >= (1 if waits else policy.CHUNKS_IN_FLIGHT):
                break
            if instance.chunks and not instance.live:
                break  # the controller can't know, but such a chunk would take no time
            self._stream(now, index)
            self._fill(now, index)
            self._chunk(now, index)

    def _fill(self, now: float, index: int) -> None:
        """Samples that wait go to free slots, read a prefill's rows at a time."""
        instance = self.instances[index]
        while len(instance.joined) < self.geometry.slots and instance.queued:
            if not instance.prefilled:
                self._prefill(now, index)
            sample = instance.prefilled.popleft()
            instance.join(sample, self.had[sample] + 1)

    def _prefill(self, now: float, index: int) -> None:
        """The next samples of the first one's bucket, in order; others keep their turn.

        Prompts, or prompts with what moved samples have of their responses; draws one token each.
        """
        instance, passed = self.instances[index], []
        bucket = self._prefill_bucket(instance.waiting[0])
        while instance.waiting and len(instance.prefilled) < self.geometry.prefill_rows:
            sample = instance.waiting.popleft()
            fits = self._prefill_bucket(sample) == bucket
            (instance.prefilled if fits else passed).append(sample)
        instance.waiting.extendleft(reversed(passed))
        self.out.tokens += len(instance.prefilled)
        when = self.instances[index].occupy(now, self.costs.prefill_ms[bucket])
        moved = any(self.had[sample] for sample in instance.prefilled)
        kind, name = ("move", "prefill") if moved else ("prefill", "")
        self._span(index, kind, when, len(instance.prefilled), name)

    def _prefill_bucket(self, sample: int) -> int:
        return self.costs.prefill_bucket(self.workload.prompts[sample] + self.had[sample])

    def _chunk(self, now: float, index: int) -> None:
        instance = self.instances[index]
        live, steps, ms, finished = instance.decode_chunk(self.geometry.chunk)
        for sample in finished:
            self.out.tokens += self.workload.responses[sample] - instance.joined[sample][1]
        self.out.steps += steps
        when = instance.occupy(now + self.costs.host_ms, ms)
        self._span(index, "decode", when, live)
        instance.chunks += 1
        self._at(when[1], self._read, index, (finished, instance.steps))

    def _read(self, now: float, index: int, payload: tuple[list[int], int]) -> None:
        """A chunk is read: finished samples are due for scoring."""
        finished, steps = payload
        instance = self.instances[index]
        instance.chunks -= 1
        instance.steps_read = steps
        for sample in finished:
            del instance.joined[sample]
            self.out.finished_at[sample] = now
            for column in self.geometry.columns:
                self.ready[column][self.bucket[sample]] += 1
                self.due[column][self.bucket[sample]].append(sample)
                self.any_due += 1
        self.unfinished -= len(finished)
        self.lateness.read(index, now, bool(finished))
        self._step(now, index)
        if finished and not self.unfinished:
            for other in range(len(self.instances)):
                self._step(now, other)
        self._offer(now)

    # ------------------------------------------------------------------ migration

    def _views(self) -> list[InstanceView]:
        return [instance.view() for instance in self.instances]

    def _migrate(self, now: float) -> None:
        # The first test is must_migrate's own, made here because it is asked at every event.
        if self.unfinished > self.plan.threshold or self.out.migrated_at is not None:
            return
        generating = sum(bool(instance.unfinished) for instance in self.instances)
        due = policy.must_migrate(
            self.plan, self.room, self.unfinished, generating, len(self.backlog)
        )
        if not due:
            return
        views = self._views()
        self.out.kept = policy.choose_kept(self.plan, views, self.history)
        self.out.migrated_at = now
        leaving = [
            index
            for index, view in enumerate(views)
            if view.unfinished and index not in self.out.kept
        ]
        for index in leaving:
            self.instances[index].leaving = True
        for index in leaving:
            if not self.instances[index].chunks:
                self._step(now, index)

    def _depart(self, now: float, index: int) -> None:
        """The chunks of a leaving instance are read: its samples go."""
        source = self.instances[index]
        source.leaving = False
        moves = policy.moves_from(
            index,
            self._views(),
            self.out.kept,
            plan=self.plan,
            geometry=self.geometry,
            costs=self.costs,
        )
        self.out.tokens -= len(source.prefilled)  # drawn here, and drawn again where they go
        before = {sample: had for sample, (_, had) in source.joined.items()}
        held = source.clear()
        for move in moves:
            target = self.instances[move.destination]
            if move.way is not None:
                self.out.tokens += sum(held[s] - before[s] for s in move.sample_ids)
            if move.way == "kv":
                when = target.occupy(now, move.predicted_ms)
                self._span(move.destination, "move", when, len(move.sample_ids), "kv")
                for sample in move.sample_ids:
                    target.join(sample, held[sample])
                continue
            for sample in reversed(move.sample_ids):
                self.had[sample] = held.get(sample, 0)
                target.waiting.appendleft(sample)
        self.out.moves += moves
        for changed in (index, *self.out.kept):
            self.lateness.note(changed, now)
        for kept in self.out.kept:
            self._step(now, kept)

    # ------------------------------------------------------------------ scoring

    def _stream(self, now: float, index: int) -> None:
        """A full batch before the next chunk, if others will be later than this instance anyway."""
        if not self.plan.stream or not self.any_due:
            return
        instance = self.instances[index]
        if instance.batches or instance.weights_at is None or instance.weights_at > now:
            return
        late = self.lateness.of_all(lambda index: self.instances[index].ages())
        if not policy.may_stream(late, index):
            return
        picked = policy.next_batch(self.ready, self.batches, part_filled=False)
        if picked is not None:
            self._score(now, index, picked)

    def _offer(self, now: float) -> None:
        """Batches to instances that may score, the least supplied first."""
        for depth in range(policy.BATCHES_IN_FLIGHT):
            for index in sorted(self.scorers):
                if not self.any_due:
                    return
                if self.instances[index].batches != depth:
                    continue
                picked = policy.next_batch(self.ready, self.batches, part_filled=depth == 0)
                if picked is None:
                    break
                self._score(now, index, picked)

    def _score(self, now: float, index: int, picked: tuple[str, int]) -> None:
        column, bucket = picked
        instance, rows = self.instances[index], self.geometry.buckets[bucket].rows
        queue = self.due[column][bucket]
        samples = [queue.popleft() for _ in range(min(rows, len(queue)))]
        self.ready[column][bucket] -= len(samples)
        self.any_due -= len(samples)
        self.out.batches += 1
        self.out.padding_rows += rows - len(samples)
        instance.batches += 1
        earliest = max(now + self.costs.host_ms, instance.weights_at or 0.0)
        when = self.instances[index].occupy(earliest, self.costs.score_ms[column][bucket])
        self.score_spans.append(when)
        self._span(index, "score", when, len(samples), column)
        self._at(when[1], self._scored, index, (column, samples))

    def _scored(self, now: float, index: int, payload: tuple[str, Sequence[int]]) -> None:
        column, samples = payload
        self.out.scored_at[self.geometry.columns.index(column), list(samples)] = now
        self.instances[index].batches -= 1
        self._offer(now)
