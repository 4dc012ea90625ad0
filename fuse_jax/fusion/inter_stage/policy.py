"""What to do next, from what is observed and what was measured: pure functions, no state.

The live runtime and the simulator call the same ones (RLHFuse, arXiv 2409.13221 §4). A `Plan` holds
the decisions made ahead of an iteration; everything here follows from a plan, from counts that a
controller can see, and from measured costs. Array shapes never change: a policy bounds what is
admitted, never how large anything is.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fuse_jax.fusion.inter_stage.costs import Costs, Geometry
from fuse_jax.fusion.inter_stage.lengths import LengthHistory

POLICIES = ("serial", "fixed", "knee", "simulated", "stream", "auto")
Way = Literal["kv", "prefill"]
WayChoice = Literal["auto", "kv", "prefill"]

# Chunks launched and not read of one instance, while no prompt waits for one of its slots (one
# while there is one: launching blindly would leave the slots that fall free idle for a chunk).
CHUNKS_IN_FLIGHT = 2
# Scoring batches dispatched and not done of one instance: the host prepares one while one runs.
BATCHES_IN_FLIGHT = 2


@dataclass(frozen=True)
class Plan:
    """Decisions for one iteration.

    Args:
      policy: the policy this came from.
      handoff: a finished sample may be scored while others are generated; False = serial.
      threshold: R_t: migrate once at most this many samples are unfinished; 0 = never migrate.
      keep: m: instances that go on generating after the migration.
      stream: generating instances score full batches in between their chunks, where that does not
        make them the last to finish.
      pack: prompts of alike predicted length start together, so that most instances are done early;
        else long ones are spread. Packing wins where decoding costs the same for few slots and
        many, and loses where it saturates.
      way: how live slots move; "auto" = whichever is predicted cheaper.
      predicted_ms, serial_ms: generation and scoring under this plan, and under the serial one;
        None if nothing was simulated.
      why: the reason, for people.
    """

    policy: str
    handoff: bool = True
    threshold: int = 0
    keep: int = 0
    stream: bool = False
    pack: bool = False
    way: WayChoice = "auto"
    predicted_ms: float | None = None
    serial_ms: float | None = None
    why: str = ""


SERIAL = Plan("serial", handoff=False, why="asked for")


class Unfinished(NamedTuple):
    """A sample not finished: `generated` response tokens are read back, of at most `cap`."""

    sample_id: int
    prompt: int
    generated: int
    cap: int

    @property
    def context(self) -> int:
        """Tokens it holds, prompt included."""
        return self.prompt + self.generated


class InstanceView(NamedTuple):
    """What the controller knows of an instance, as of its last chunk read.

    `live` are in slots, `waiting` have none yet. `alive` is False once it failed.
    """

    live: tuple[Unfinished, ...]
    waiting: tuple[Unfinished, ...] = ()
    alive: bool = True

    @property
    def unfinished(self) -> int:
        return len(self.live) + len(self.waiting)


class Ages(NamedTuple):
    """What streaming reads of an instance, as of its last chunk read: much less than a view.

    Response tokens of each sample in a slot (`live`) and of each without one (`waiting`), at most
    `cap`; tokens that those in slots hold, prompt included (`contexts`; of the waiting ones where
    no slot is taken).
    """

    live: list[int]
    waiting: list[int]
    contexts: list[int]
    cap: int


class Move(NamedTuple):
    """One group of samples to move, at most `prefill_rows`.

    `way` "kv": detach, send, attach. "prefill": detach, drop the rows, read prompt and response so
    far anew at the destination. None: these are waiting prompts, only requeued.
    `predicted_ms` is the time the destination spends on it.
    """

    source: int
    destination: int
    sample_ids: tuple[int, ...]
    way: Way | None
    predicted_ms: float


# ------------------------------------------------------------------ prompts to instances


def dispatch(
    lengths: Sequence[float], instances: int, loads: Sequence[float] | None = None
) -> list[int]:
    """The instance of each prompt: longest predicted first, to the least loaded.

    Args:
      lengths: predicted response lengths; equal ones are dealt in turn.
      loads: what each instance has already; `inf` = takes none (it failed).
    """
    load = list(loads) if loads is not None else [0.0] * instances
    given = [0] * instances
    if len(load) != instances or min(load) == float("inf"):
        raise ValueError(f"loads={loads}: give one of {instances} instances a finite load")
    chosen = [0] * len(lengths)
    for prompt in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = min(range(instances), key=lambda i: (load[i], given[i], i))
        chosen[prompt] = target
        load[target] += max(lengths[prompt], 1.0)
        given[target] += 1
    return chosen


def assign(
    predicted: Sequence[float], instances: int, slots: int, *, pack: bool = False
) -> tuple[list[list[int]], list[int]]:
    """Prompts of each instance at the start, at most `slots` each, and the backlog all share.

    Longest predicted first in both: what is long should start early. An instance with a free slot
    and nothing waiting takes the next prompts of the backlog. `pack`: see `Plan`.
    """
    order = sorted(range(len(predicted)), key=lambda i: -predicted[i])
    first, backlog = order[: instances * slots], order[instances * slots :]
    if pack:
        share = -(-len(first) // instances)
        return [first[i * share : (i + 1) * share] for i in range(instances)], backlog
    given: list[list[int]] = [[] for _ in range(instances)]
    least = [(0.0, 0, i) for i in range(instances)]  # a heap: load, prompts, instance
    for prompt in first:
        load, count, target = heapq.heappop(least)
        given[target].append(prompt)
        if count + 1 < slots:
            heapq.heappush(least, (load + max(predicted[prompt], 1.0), count + 1, target))
    return given, backlog


def pull(free: int, backlog: int, geometry: Geometry) -> int:
    """How many prompts of the backlog an instance takes that has `free` slots and none waiting.

    Whole prefills: rows that find no slot wait beside them, for they cost nothing.
    """
    rows = geometry.prefill_rows
    return min(-(-free // rows) * rows, backlog)


# ------------------------------------------------------------------ migration


def admission(costs: Costs, geometry: Geometry) -> int:
    """The most samples an instance may have after a migration: where decode latency saturates, and
    never more than its slots, which are what its cache memory holds."""
    return costs.decode.saturation(geometry.slots)


def must_migrate(plan: Plan, room: int, unfinished: int, generating: int, backlog: int) -> bool:
    """Whether the one migration of this iteration is due. Ask until it has happened.

    Args:
      room: the most samples of a kept instance, see `admission`.
      unfinished: samples not finished, over all instances, as far as chunks have been read.
      generating: instances alive that still have unfinished samples.
      backlog: prompts that no instance has taken yet.
    """
    if backlog:
        return False
    kept = min(plan.keep, generating)
    # More than the kept ones admit can't move; below the plan's R_t they soon will.
    return 0 < unfinished <= min(plan.threshold, kept * room) and kept < generating


def remaining_work(view: InstanceView, history: LengthHistory) -> float:
    """Tokens an instance is expected to generate still."""
    samples = (*view.live, *view.waiting)
    return sum(history.remaining(s.generated, s.cap) for s in samples)


def choose_kept(
    plan: Plan, views: Sequence[InstanceView], history: LengthHistory
) -> tuple[int, ...]:
    """The (at most) `plan.keep` instances with the most remaining work, ascending.

    Only instances alive with something unfinished are kept: one that scores already goes on.
    """
    work = {
        i: remaining_work(view, history)
        for i, view in enumerate(views)
        if view.alive and view.unfinished
    }
    return tuple(sorted(sorted(work, key=lambda i: (-work[i], i))[: plan.keep]))


def moves_from(
    source: int,
    views: Sequence[InstanceView],
    kept: Sequence[int],
    *,
    plan: Plan,
    geometry: Geometry,
    costs: Costs,
) -> list[Move]:
    """Where the unfinished samples of `source` go. Call when its last chunk has been read.

    `views` are as of now, with what was moved to a kept instance before counted there. The least
    filled kept instance is filled to the level at which all would be equally full, then the next,
    so that samples of one source stay together: a group costs the same for one row as for many.

    Raises ValueError: a live sample would find no slot.
    """
    held = {i: views[i].unfinished for i in kept}
    level = -(-sum(view.unfinished for view in views if view.alive) // len(kept))
    moves: list[Move] = []
    for samples, live in ((views[source].live, True), (views[source].waiting, False)):
        while samples:
            target = min(kept, key=lambda i: (held[i], i))
            room = max(level - held[target], 1)
            taken, samples = samples[:room], samples[room:]
            held[target] += len(taken)
            if live and held[target] > geometry.slots:
                raise ValueError(
                    f"{held[target]} samples do not fit the {geometry.slots} slots of instance "
                    f"{target}: must_migrate() was not asked, or instances failed since"
                )
            for first in range(0, len(taken), geometry.prefill_rows):
                group = taken[first : first + geometry.prefill_rows]
                moves.append(_move(source, target, group, live, plan, geometry, costs))
    return moves


def _move(
    source: int,
    target: int,
    group: Sequence[Unfinished],
    live: bool,
    plan: Plan,
    geometry: Geometry,
    costs: Costs,
) -> Move:
    ids = tuple(sample.sample_id for sample in group)
    if not live:
        return Move(source, target, ids, None, 0.0)
    contexts = [sample.context for sample in group]
    by_way: dict[Way, float] = {
        "kv": costs.move_by_cache(contexts),
        "prefill": costs.move_by_prefill(contexts, geometry.prefill_rows),
    }
    way: Way = min(by_way, key=by_way.__getitem__) if plan.way == "auto" else plan.way
    return Move(source, target, ids, way, by_way[way])


# ------------------------------------------------------------------ scoring


def may_score(plan: Plan, unfinished: int, backlog: int) -> bool:
    """Whether instances that have nothing (left) to generate may score. Others only stream.

    Args:
      unfinished: samples not finished, over all instances and the backlog.
      backlog: prompts that no instance has taken yet.
    """
    return backlog == 0 if plan.handoff else unfinished == 0


class Batch(NamedTuple):
    """A kind of scoring batch: column, length bucket, rows, and the ms it takes, full or not."""

    column: str
    bucket: int
    rows: int
    ms: float


def scoring_batches(geometry: Geometry, costs: Costs) -> list[Batch]:
    """All kinds of scoring batches, the longest first."""
    kinds = [
        Batch(column, i, bucket.rows, costs.score_ms[column][i])
        for column in geometry.columns
        for i, bucket in enumerate(geometry.buckets)
    ]
    return sorted(kinds, key=lambda kind: -kind.ms)


def next_batch(
    ready: Mapping[str, Sequence[int]], batches: Sequence[Batch], *, part_filled: bool
) -> tuple[str, int] | None:
    """The (column, bucket) an instance scores next; the oldest of its samples, at most its rows.

    A full batch before a part-filled one; of full ones the longest (long work last would leave
    others idle at the end), of part-filled ones the one that does most (of equal ones the longest).
    None: nothing to do.

    Args:
      ready: column -> samples of each bucket whose column is due and not dispatched.
      batches: as `scoring_batches` gives them.
      part_filled: whether a batch with padding rows is acceptable: yes where the instance would
        idle, no where it would keep generation waiting.
    """
    for column, bucket, rows, _ in batches:
        if ready[column][bucket] >= rows:
            return column, bucket
    if not part_filled:
        return None
    best, most = None, -1.0
    for column, bucket, rows, ms in batches:
        count = ready[column][bucket]
        if count and ms * count / rows > most:
            best, most = (column, bucket), ms * count / rows
    return best


# ------------------------------------------------------------------ scoring in the gaps


def expected_end(
    now: float, ages: Ages, history: LengthHistory, geometry: Geometry, costs: Costs
) -> float:
    """When an instance is expected to have finished its own samples, in ms.

    `ages` are as of `now`. Its live ones end with the longest; the waiting ones take their share of
    slots before that.
    """
    samples, waiting = ages.live + ages.waiting, len(ages.waiting)
    if not samples:
        return now
    steps = last = history.longest_remaining(samples, ages.cap)
    if waiting:
        steps += waiting * history.remaining(0, ages.cap) / geometry.slots
    return now + steps * _step_ms(ages, last / 2, costs)


def outlasting(
    now: float, ages: Ages, history: LengthHistory, costs: Costs, horizon: float
) -> float:
    """How many samples of an instance are expected to be unfinished at `horizon` (ms).

    `now` as for `expected_end`, of which the latest of all instances is to be the horizon.
    """
    samples = ages.live + ages.waiting
    if not samples:
        return 0.0
    steps = max(horizon - now, 0.0) / _step_ms(ages, 0.0, costs)
    return history.outlasting(samples, steps, ages.cap)


def _step_ms(ages: Ages, ahead: float, costs: Costs) -> float:
    """ms of a decode step of an instance, when it has `ahead` more tokens in its slots."""
    contexts = ages.contexts
    longest = costs.decode.statistic == "longest"
    context = max(contexts) if longest else sum(contexts) / len(contexts)
    return costs.decode(max(len(ages.live), 1), context + ahead)


def may_stream(late: Sequence[float], instance: int) -> bool:
    """Whether a generating instance may score a batch before its next chunk.

    A batch of t ms makes the whole iteration t ms longer if this instance is the last to finish,
    and about t / n shorter if it is not, for then it is one batch less to score at the end. So it
    pays if the chance to be last is below 1 / n; half of that is asked, for the chance is a guess.

    Args:
      late: `outlasting` of every instance, 0 of those with nothing to generate.
    """
    return sum(late) > 0 and 2 * len(late) * late[instance] <= sum(late)
