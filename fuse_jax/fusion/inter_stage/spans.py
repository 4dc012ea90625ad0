"""What one instance did from when to when: the record that simulated and live timelines share."""

from __future__ import annotations

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
