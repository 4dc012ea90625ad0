"""What one instance did from when to when: the record that simulated and live timelines share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# The kinds of work, in the order legends list them. "score" spans name their column.
KINDS = ("prefill", "decode", "move", "weights", "score")


class Span(NamedTuple):
    """One piece of work of `instance` (a row of the chart), `start` to `end` in ms.

    `count` is live slots (decode), rows (prefill, move) or samples (score). `name` tells what it
    was in more words: the column of a scoring batch, "kv" or "prefill" of a move.
    `weights` spans use the link, not the devices: they may lie beside others of the same row.
    """

    instance: int
    kind: str
    start: float
    end: float
    count: int = 0
    name: str = ""


class Figures(NamedTuple):
    """What a timeline amounts to. Times in ms, shares 0..1.

    `generation_ms`: when the last decode chunk ended. `utilisation`: device time spent on anything,
    of instances x total. `scoring_hidden`: device time of scoring that lies before `generation_ms`,
    of all scoring.
    """

    total_ms: float
    generation_ms: float
    utilisation: float
    scoring_hidden: float


def figures(spans: Iterable[Span], instances: int) -> Figures:
    """Figures of a timeline of `instances` rows that starts at 0. Weights use no device time."""
    work = [span for span in spans if span.kind != "weights"]
    total = max((span.end for span in work), default=0.0)
    # A chunk launched ahead that found all slots done took no time, and may be seen late.
    decoding = [span.end for span in work if span.kind == "decode" and span.count]
    generation = max(decoding, default=0.0)
    scoring = [span for span in work if span.kind == "score"]
    hidden = sum(max(min(span.end, generation) - span.start, 0.0) for span in scoring)
    scored = sum(span.end - span.start for span in scoring)
    busy = sum(span.end - span.start for span in work)
    return Figures(
        total,
        generation,
        busy / (instances * total) if total else 0.0,
        hidden / scored if scored else 0.0,
    )


def ms_text(ms: float) -> str:
    """A time for people: whole ms from 1000 on, else four digits."""
    return f"{ms:,.0f}" if abs(ms) >= 1000 else f"{ms:.4g}"
