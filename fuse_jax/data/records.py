"""The three records every data source is turned into, and the account of what was left out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

# Token ids as anyone may hand them in.
TokenIds = Sequence[int] | np.ndarray


class DataError(ValueError):
    """Data that can't be used; the message names the place (file and row) and the fix."""


# eq=False: two records are the same only if they are one object; arrays have no single truth value.
@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt. `id` is its row's place in the source before filtering: filters don't shift it.

    `tokens` int32, no padding and no trailing stop token; `text` is what a reader (or a reward
    function) sees; `meta` holds the row's other fields and is given to reward functions.
    """

    id: int
    tokens: Int32[np.ndarray, " P"]
    text: str
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Preference:
    """Two different answers to one prompt; responses int32 end in a stop token unless truncated.

    `margin` >= 0 is subtracted inside the Bradley-Terry loss; 0 where the source has none.
    """

    prompt_tokens: Int32[np.ndarray, " P"]
    chosen_tokens: Int32[np.ndarray, " C"]
    rejected_tokens: Int32[np.ndarray, " D"]
    margin: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Demonstration:
    """A prompt and an answer to imitate; the answer ends in a stop token unless truncated."""

    prompt_tokens: Int32[np.ndarray, " P"]
    response_tokens: Int32[np.ndarray, " R"]


@dataclasses.dataclass
class Filtered:
    """What became of every row of a source: `rows == kept + sum(dropped.values())`, always.

    `changed` counts rows that were kept in another form (a truncated response). `str()` is the
    line to print.
    """

    what: str
    rows: int = 0
    kept: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    changed: Counter[str] = dataclasses.field(default_factory=Counter)
    stopped_early: bool = False

    def __str__(self) -> str:
        line = f"{self.what}: {self.rows} rows read, {self.kept} kept"
        if self.stopped_early:
            line += " (stopped at the limit asked for)"
        for name, counts in (("dropped", self.dropped), ("changed", self.changed)):
            if counts:
                line += f"; {name}: " + ", ".join(f"{n} {why}" for why, n in sorted(counts.items()))
        return line


def token_array(tokens: TokenIds) -> Int32[np.ndarray, " T"]:
    """Token ids as a read-only int32 array (records are shared: nobody may write into one)."""
    array = np.array(tokens, dtype=np.int32)
    array.flags.writeable = False
    return array
