"""What is simulated, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fuse_jax.fusion.inter_stage.policy import Move
from fuse_jax.fusion.inter_stage.spans import Span


@dataclass(frozen=True)
class Workload:
    """Samples of one iteration: `prompts[i]`, `responses[i]` tokens, responses at most `cap`.

    `predicted` are the response lengths expected before generation; empty = all alike.
    """

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    cap: int
    predicted: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.responses:
            raise ValueError("responses is empty: give at least one sample")
        if len(self.prompts) != len(self.responses):
            raise ValueError(f"{len(self.prompts)} prompts for {len(self.responses)} responses")
        if min(self.prompts) < 1:
            raise ValueError(f"prompts hold a length of {min(self.prompts)}: at least 1 token")
        if min(self.responses) < 1 or max(self.responses) > self.cap:
            raise ValueError(
                f"responses of {min(self.responses)} to {max(self.responses)} tokens must lie "
                f"between 1 and cap={self.cap}"
            )
        if self.predicted and len(self.predicted) != len(self.responses):
            raise ValueError(f"{len(self.predicted)} predicted for {len(self.responses)} responses")


@dataclass
class Outcome:
    """How a simulated iteration went. Times in ms from its start.

    `scoring_ms` is device time of all scoring batches together, of which `hidden_ms` lay before the
    last sample was seen finished. `finished_at[i]`: when the controller saw sample i finished;
    `scored_at[c, i]`: when its column c was there. `steps` are decode steps over all instances,
    `tokens` response tokens generated, the first ones (of prefills) included.
    """

    total_ms: float = 0.0
    generation_ms: float = 0.0
    scoring_ms: float = 0.0
    hidden_ms: float = 0.0
    migrated_at: float | None = None
    kept: tuple[int, ...] = ()
    moves: list[Move] = field(default_factory=list)
    batches: int = 0
    padding_rows: int = 0
    steps: int = 0
    tokens: int = 0
    finished_at: np.ndarray = field(default_factory=lambda: np.zeros(0))
    scored_at: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    spans: list[Span] = field(default_factory=list)

    @property
    def migrated(self) -> int:
        """Live samples moved."""
        return sum(len(move.sample_ids) for move in self.moves if move.way is not None)

    @property
    def scoring_hidden(self) -> float:
        """Share, 0..1, of scoring that ran while samples were still being generated."""
        return self.hidden_ms / self.scoring_ms if self.scoring_ms else 0.0
