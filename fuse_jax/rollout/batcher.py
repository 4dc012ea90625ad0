"""Continuous batching on the host: prompts go in, finished samples come out one by one.

A finished slot is refilled before the next dispatch. Prompts are prefilled a full group of rows
ahead of need and their rows wait beside the slots, so a slot that falls free alone does not cost
a mostly empty prefill; only the last group of a bucket has padding rows.

Reading a chunk waits for the device. While prompts wait, chunk k is read before chunk k + 1 is
launched, because launching blindly would leave every slot that finished in k idle for a chunk (at a
mean response of 50 tokens and chunks of 8, a sixth of the work). When none waits there is nothing
to refill: chunk k + 1 is launched first, and costs nothing if everything turns out to be done.
Samples are handed over after the next launch, so that the caller's work and the device's overlap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from fuse_jax.models.transformer import Params
from fuse_jax.placement.host import start_copies, to_host
from fuse_jax.rollout.engine import Chunk, Engine, Rows
from fuse_jax.rollout.sampling import Draw
from fuse_jax.samples import Sample


@dataclass(frozen=True)
class Request:
    """A prompt to respond to, with at most `max_new_tokens` tokens."""

    sample_id: int
    prompt_tokens: np.ndarray
    max_new_tokens: int
    meta: dict = field(default_factory=dict)


@dataclass(eq=False)  # one is equal to itself only; compared often
class Progress:
    """A request and what has been read back of its response so far: `generated` tokens.

    They stay where they were read, and are put together when they are asked for.
    """

    request: Request
    generated: int = 0
    _parts: list[tuple[Draw | Chunk, int, int]] = field(default_factory=list)

    def record(self, drawn: Draw | Chunk, row: int, count: int) -> None:
        """Its next tokens: the first `count` steps of `row` of what was drawn, on the host."""
        self._parts.append((drawn, row, count))
        self.generated += count

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the response so far."""
        return len(self.request.prompt_tokens) + self.generated

    @property
    def tokens(self) -> np.ndarray:
        """Of the response so far, int32."""
        return self._joined("tokens", np.int32)

    def as_prompt(self) -> Request:
        """The request with the response so far at the end of its prompt."""
        if not self.generated:
            return self.request
        tokens = np.concatenate([self.request.prompt_tokens, self.tokens])
        return replace(self.request, prompt_tokens=tokens)

    def sample(self, stop_tokens: tuple[int, ...]) -> Sample:
        """The finished sample. Truncated: the last token is no stop token."""
        request, tokens = self.request, self.tokens
        has_gaps = self._parts[0][0].gaps is not None
        return Sample(
            sample_id=request.sample_id,
            prompt_tokens=request.prompt_tokens,
            response_tokens=tokens,
            log_probs=self._joined("log_probs", np.float32),
            truncated=int(tokens[-1]) not in stop_tokens,
            gaps=self._joined("gaps", np.float32) if has_gaps else None,
            meta=request.meta,
        )

    def _joined(self, name: str, dtype: Any) -> np.ndarray:
        """One array of what was drawn: `[steps, slots]`, or `[rows]` of one step, in each part."""
        whole = np.empty(self.generated, dtype)
        start = 0
        for drawn, row, count in self._parts:
            array = getattr(drawn, name)
            whole[start : start + count] = array[row] if array.ndim == 1 else array[:count, row]
            start += count
        return whole


@dataclass
class RolloutStats:
    """Counts of one run. `seconds` is wall time from the first launch to the last read.

    `slot_steps` = decode steps x slots, of which `occupied_slot_steps` drew a token that counts.
    """

    samples: int = 0
    truncated: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    chunks: int = 0
    decode_steps: int = 0
    slot_steps: int = 0
    occupied_slot_steps: int = 0
    prefills: int = 0
    prefill_rows: int = 0
    prefill_padding_rows: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second of wall time."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def occupancy(self) -> float:
        """Share of slot-steps that drew a token."""
        return self.occupied_slot_steps / self.slot_steps if self.slot_steps else 0.0


@dataclass
class _Group:
    """Prefilled rows of one bucket, of which the first `taken` are in slots."""

    rows: Rows
    draw: Draw
    members: list[Progress]
    taken: int = 0


@dataclass
class _Launch:
    """A dispatched chunk, who was in which slot, and who entered just before it."""

    chunk: Chunk
    owners: list[Progress | None]
    entered: list[tuple[Progress, Draw, int]]


# Told of every dispatch: "prefill", "resume" (a prefill of samples that moved here) or "decode", an
# array that is ready when the device is done with it, and the rows that are real.
Watch = Callable[[str, jax.Array, int], None]


class Batcher:
    """Keeps the slots of one engine full. Host state only: the arithmetic is the engine's.

    `launch` never waits for the device, `collect` waits for the oldest launched chunk. One
    controller can so drive many batchers, each over its own devices.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        seed_key: Any,
        watch: Watch | None = None,
        start: Callable[[Any], None] = start_copies,
        read: Callable[[Any], Any] = to_host,
    ) -> None:
        self.engine, self.seed_key = engine, seed_key
        self._watch = watch or (lambda kind, array, rows: None)
        self._start, self._read = start, read
        self.params = engine.place_params(params)
        self.queue: deque[Progress] = deque()
        self.stats = RolloutStats()
        self.state = engine.init_decode_state()
        self._groups: deque[_Group] = deque()
        self._slots: list[Progress | None] = [None] * engine.rollout.slots
        self._entered: list[tuple[Progress, Draw, int]] = []
        self._launched: deque[_Launch] = deque()
        self._counted_at: float | None = None  # up to when `stats.seconds` goes

    # ------------------------------------------------------------------ what is where

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        if not self._groups:  # asked often
            return len(self.queue)
        return len(self.queue) + sum(len(g.members) - g.taken for g in self._groups)

    @property
    def queued(self) -> list[Progress]:
        """What has no slot yet, in order."""
        ahead = [member for group in self._groups for member in group.members[group.taken :]]
        return ahead + list(self.queue)

    @property
    def live(self) -> dict[int, Progress]:
        """Slot -> its unfinished request, as far as has been read back."""
        return {slot: owner for slot, owner in enumerate(self._slots) if owner is not None}

    @property
    def unfinished(self) -> int:
        """Requests that have not come out of `collect` yet."""
        return self.waiting + len(self._slots) - self._slots.count(None)

    @property
    def launched(self) -> int:
        """Chunks launched and not read."""
        return len(self._launched)

    # ------------------------------------------------------------------ driving it

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Raises ValueError for a prompt or a cap that the geometry cannot hold."""
        for request in requests:
            check_request(self.engine, request)
            self.queue.append(Progress(request))

    def launch(self) -> bool:
        """Fill free slots and dispatch a chunk; False if no slot is occupied."""
        if self._counted_at is None:
            self._counted_at = time.perf_counter()
        if self.waiting:
            self._fill()
        live = len(self._slots) - self._slots.count(None)
        if not live:
            return False
        self.state, chunk = self.engine.generate(self.params, self.state, self.seed_key)
        self._start(chunk)
        self._watch("decode", chunk.done, live)
        self._launched.append(_Launch(chunk, list(self._slots), self._entered))
        self._entered = []
        self.stats.chunks += 1
        return True

    def collect(self) -> list[Sample]:
        """Read the oldest launched chunk; returns the samples it finished, by slot."""
        launch = self._launched.popleft()
        firsts: dict[int, Draw] = {}  # many enter from one prefill
        for progress, draw, row in launch.entered:
            if id(draw) not in firsts:
                firsts[id(draw)] = self._read(draw)
            progress.record(firsts[id(draw)], row, 1)
        chunk: Chunk = self._read(launch.chunk)
        counts, done = chunk.counts.tolist(), chunk.done.tolist()
        self._count(int(chunk.steps), sum(counts))
        finished: dict[int, Sample] = {}
        for slot, owner in enumerate(launch.owners):
            if owner is None or self._slots[slot] is not owner:
                continue
            owner.record(chunk, slot, counts[slot])
            if done[slot]:
                finished[slot] = owner.sample(self.engine.stop_tokens)
        for slot, sample in finished.items():  # after all that may raise, so that nothing is lost
            self._slots[slot] = None
            self._count_sample(sample)
        return list(finished.values())

    def run(self) -> Iterator[Sample]:
        """Samples of everything queued, each as soon as it is finished."""
        self.launch()
        while self._launched:
            if not self.waiting and self.launched < 2:
                self.launch()
            finished = self.collect()
            if self.waiting or not self._launched:
                self.launch()
            yield from finished

    # ------------------------------------------------------------------ moving what is unfinished

    def withdraw(self) -> list[Progress]:
        """Take out everything that has no slot yet, to be `resume`d elsewhere.

        Rows that were prefilled ahead are dropped; prefilled again they are the same.
        """
        waiting = self.queued
        self._groups.clear()
        self.queue.clear()
        return waiting

    def resume(self, moved: Iterable[Progress]) -> None:
        """Queue, before all others, what `withdraw` or `take_out` gave: it is read again."""
        self.queue.extendleft(reversed(list(moved)))

    def take_out(self, slots: Sequence[int]) -> list[Progress]:
        """Take live `slots` (at most `rollout.prefill_rows`) out and leave their caches behind.

        Raises RuntimeError while a chunk is unread: its tokens would be lost.
        """
        if self._launched or self._entered:
            raise RuntimeError("detach while a chunk is unread: launch() and collect() first")
        empty = [slot for slot in slots if self._slots[slot] is None]
        if empty:
            raise ValueError(f"slots {empty} hold nothing to detach")
        self.state = self.engine.release(self.state, self._slot_index(slots))
        moved = [self._slots[slot] for slot in slots]
        for slot in slots:
            self._slots[slot] = None
        return moved  # type: ignore[return-value]

    def detach(self, slots: Sequence[int]) -> tuple[Rows, list[Progress]]:
        """`take_out` with their caches. Rows beyond `len(slots)` are padding."""
        rows = self.engine.extract(self.state, self._slot_index(slots))
        return rows, self.take_out(slots)

    def attach(self, rows: Rows, moved: Sequence[Progress]) -> Rows:
        """Put what `detach` took out of another batcher into free slots.

        `rows` are moved to this engine's devices, and returned as they are there (when they are
        ready, they have arrived). Raises ValueError if there are too few slots.
        """
        free = [slot for slot, owner in enumerate(self._slots) if owner is None][: len(moved)]
        if len(free) < len(moved):
            raise ValueError(f"{len(moved)} live samples do not fit {len(free)} free slots")
        placed = self.engine.place(rows)
        self.state = self.engine.insert(self.state, placed, self._slot_index(free))
        for slot, owner in zip(free, moved, strict=True):
            self._slots[slot] = owner
        return placed

    # ------------------------------------------------------------------ inside

    def _fill(self) -> None:
        free = deque(slot for slot, owner in enumerate(self._slots) if owner is None)
        while free and self.waiting:
            if not self._groups:
                self._groups.append(self._prefill())
            group = self._groups[0]
            slots = [
                free.popleft() for _ in range(min(len(free), len(group.members) - group.taken))
            ]
            index = self._slot_index(slots, first=group.taken)
            self.state = self.engine.insert(self.state, group.rows, index)
            for row, slot in enumerate(slots, group.taken):
                self._slots[slot] = group.members[row]
                self._entered.append((group.members[row], group.draw, row))
            group.taken += len(slots)
            if group.taken == len(group.members):
                self._groups.popleft()

    def _prefill(self) -> _Group:
        """Prefill the next requests of the first one's bucket, in order; others keep their turn."""
        engine, count = self.engine, self.engine.rollout.prefill_rows
        bucket = self._bucket_of(self.queue[0])
        chosen, passed = [], []
        for progress in self.queue:
            (chosen if self._bucket_of(progress) == bucket else passed).append(progress)
            if len(chosen) == count:
                break
        generated = np.zeros(count, np.int32)
        generated[: len(chosen)] = [progress.generated for progress in chosen]
        arrays = prefill_arrays([progress.as_prompt() for progress in chosen], count, bucket)
        rows, draw = engine.prefill(self.params, *arrays, self.seed_key, generated=generated)
        for _ in range(len(chosen) + len(passed)):  # only now: what fails before loses none of them
            self.queue.popleft()
        self.queue.extendleft(reversed(passed))
        self._start(draw)
        self._watch("resume" if generated.any() else "prefill", draw.tokens, len(chosen))
        self.stats.prefills += 1
        self.stats.prefill_rows += len(chosen)
        self.stats.prefill_padding_rows += count - len(chosen)
        return _Group(rows, draw, chosen)

    def _bucket_of(self, progress: Progress) -> int:
        engine = self.engine
        fresh = not progress.generated
        return (engine.bucket_of if fresh else engine.resume_bucket_of)(progress.length)

    def _slot_index(self, slots: Sequence[int], first: int = 0) -> np.ndarray:
        """Where each of `prefill_rows` rows goes: from row `first` on to `slots`, else nowhere."""
        rollout = self.engine.rollout
        if len(slots) > rollout.prefill_rows:
            raise ValueError(
                f"{len(slots)} rows at once, but rollout.prefill_rows={rollout.prefill_rows}"
            )
        index = np.full(rollout.prefill_rows, rollout.slots, np.int32)
        index[first : first + len(slots)] = slots
        return index

    def _count(self, steps: int, drawn: int) -> None:
        stats = self.stats
        stats.decode_steps += steps
        stats.slot_steps += steps * len(self._slots)
        stats.occupied_slot_steps += drawn
        now = time.perf_counter()
        stats.seconds += now - (self._counted_at or now)
        self._counted_at = now

    def _count_sample(self, sample: Sample) -> None:
        stats = self.stats
        stats.samples += 1
        stats.truncated += sample.truncated
        stats.generated_tokens += len(sample.response_tokens)
        stats.prompt_tokens += len(sample.prompt_tokens)


def check_request(engine: Engine, request: Request) -> None:
    """Raises ValueError for a prompt or a cap that the engine's geometry cannot hold."""
    engine.bucket_of(len(request.prompt_tokens))
    if not 1 <= request.max_new_tokens <= engine.rollout.max_new_tokens:
        raise ValueError(
            f"sample {request.sample_id} asks for {request.max_new_tokens} new tokens: "
            f"between 1 and rollout.max_new_tokens={engine.rollout.max_new_tokens}"
        )
    if not 0 <= request.sample_id < 2**31:
        raise ValueError(f"sample_id={request.sample_id} must lie in [0, 2**31)")


def prefill_arrays(
    requests: Sequence[Request], rows: int, bucket: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens `[rows, bucket]`, lengths, sample ids and caps; rows beyond the requests are padding.

    A padding row is one token with sample id -1 and nothing to generate.
    """
    tokens = np.zeros((rows, bucket), np.int32)
    lengths, caps = np.ones(rows, np.int32), np.zeros(rows, np.int32)
    sample_ids = np.full(rows, -1, np.int32)
    for row, request in enumerate(requests):
        length = len(request.prompt_tokens)
        tokens[row, :length] = request.prompt_tokens
        lengths[row], sample_ids[row] = length, request.sample_id
        caps[row] = request.max_new_tokens
    return tokens, lengths, sample_ids, caps


def generate_samples(
    engine: Engine,
    params: Params,
    prompts: Sequence[np.ndarray],
    *,
    seed_key: Any,
    sample_ids: Sequence[int] | None = None,
    max_new_tokens: int | Sequence[int] | None = None,
    meta: Sequence[dict] | None = None,
    stats: RolloutStats | None = None,
) -> Iterator[Sample]:
    """Responses to `prompts`, each yielded as soon as it is finished (so in no set order).

    Args:
      prompts: int token ids of each prompt, at most `rollout.max_prompt_length`.
      sample_ids: what randomness is drawn from; distinct, default 0, 1, ...
      max_new_tokens: one cap, or one a prompt; default `rollout.max_new_tokens`.
      stats: is filled in while samples come out.

    Raises ValueError for what does not fit the engine's geometry, before anything runs.
    """
    count = len(prompts)
    ids = range(count) if sample_ids is None else [int(i) for i in sample_ids]
    if len(ids) != count or len(set(ids)) != count:
        raise ValueError(f"sample_ids must be {count} distinct numbers, one a prompt")
    cap = engine.rollout.max_new_tokens if max_new_tokens is None else max_new_tokens
    caps = [cap] * count if isinstance(cap, (int, np.integer)) else [int(c) for c in cap]
    metas = [{} for _ in range(count)] if meta is None else meta
    batcher = Batcher(engine, params, seed_key)
    if stats is not None:
        batcher.stats = stats
    batcher.submit(
        Request(i, np.asarray(prompt, np.int32), c, m)
        for i, prompt, c, m in zip(ids, prompts, caps, metas, strict=True)
    )
    return batcher.run()
