"""What past responses say about those still in the making."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class LengthHistory:
    """Recent response lengths, in tokens. Empty is allowed: nothing is known yet."""

    lengths: tuple[int, ...] = ()

    def extend(self, new: Sequence[int], window: int = 2048) -> LengthHistory:
        """This and `new`, of which the last `window` are kept."""
        return LengthHistory((*self.lengths, *(int(length) for length in new))[-window:])

    @cached_property
    def _sorted(self) -> np.ndarray:
        return np.sort(np.array(self.lengths, np.int64))

    @cached_property
    def _sums(self) -> np.ndarray:
        """[i] = the sum of all lengths from the i-th shortest on."""
        return np.append(np.cumsum(self._sorted[::-1])[::-1], 0)

    @cached_property
    def _longer(self) -> list[int]:
        """[n] = how many lengths are above n, up to the longest."""
        known = self._sorted
        points = np.arange(known[-1] + 1 if len(known) else 0)
        return (len(known) - np.searchsorted(known, points, side="right")).tolist()

    @cached_property
    def _ascending(self) -> list[int]:
        return self._sorted.tolist()

    def remaining(self, generated: int, cap: int) -> float:
        """Expected tokens still to come of a response that has `generated`, at most `cap` in all.

        E[min(L, cap) - generated | L > generated]; half the way to the cap if no past response was
        that long.
        """
        known = self._sorted
        first = int(np.searchsorted(known, generated, side="right"))
        if first == len(known):
            return max((cap - generated) / 2, 0.0)
        capped = int(np.searchsorted(known, cap, side="right"))
        capped = max(capped, first)
        total = self._sums[first] - self._sums[capped] + (len(known) - capped) * cap
        return max(float(total) / (len(known) - first) - generated, 0.0)

    def longest_remaining(self, generated: Sequence[int], cap: int) -> float:
        """Tokens until the last of several responses is expected to end.

        Each contributes the k/(k+1) quantile of what is left of it, k responses in all.
        """
        if not len(generated):
            return 0.0
        share = len(generated) / (len(generated) + 1)
        # No numpy here and below: a live controller asks after every chunk, of a few responses.
        known, longer = self._ascending, self._longer
        seen, most = len(longer), -math.inf
        for age in generated:
            left = longer[age] if age < seen else 0
            end = known[int(share * left) - left] if left else age + share * (cap - age)
            if end > cap:
                end = cap
            if end - age > most:
                most = end - age
        return float(most)

    def outlasting(self, generated: Sequence[int], more: float, cap: int) -> float:
        """How many of several responses are expected to draw `more` further tokens, or beyond.

        The sum of P(L >= g + more | L > g), to half a token; where no past response was that long,
        L is taken to lie anywhere up to the cap.
        """
        if not len(generated):
            return 0.0
        longer, sure = self._longer, math.ceil(max(more - 0.5, 0.5)) - 1
        seen, expected = len(longer), 0.0
        for age in generated:
            left = longer[age] if age < seen else 0
            if not left:
                expected += min(max(1 - more / max(cap - age, 1), 0.0), 1.0)
            elif age + sure < seen:
                expected += longer[age + sure] / left
        return expected

    def drift(self, newer: LengthHistory) -> float:
        """Kolmogorov-Smirnov distance, 0..1, between the two; 1 if just one of them is empty."""
        a, b = self._sorted, newer._sorted
        if not len(a) or not len(b):
            return float(len(a) != len(b))
        points = np.union1d(a, b)
        below_a = np.searchsorted(a, points, side="right") / len(a)
        below_b = np.searchsorted(b, points, side="right") / len(b)
        return float(np.abs(below_a - below_b).max())


@dataclass
class PromptLengths:
    """Response lengths by prompt, for prompts that are asked again.

    `ratios` are actual / predicted lengths of the last responses to prompts that were known: how
    far a prediction is to be trusted.
    """

    ratios: tuple[float, ...] = ()
    _seen: dict[Hashable, tuple[int, int]] = field(default_factory=dict)  # responses, tokens
    _responses: int = 0
    _tokens: int = 0

    def predict(self, prompts: Sequence[Hashable]) -> tuple[float, ...]:
        """Tokens of a response to each, () if none of them is known.

        (tokens seen + overall mean) / (responses seen + 1): one response alone says little.
        """
        if not any(prompt in self._seen for prompt in prompts):
            return ()
        mean = self._tokens / self._responses
        known = [self._seen.get(prompt, (0, 0)) for prompt in prompts]
        return tuple((tokens + mean) / (count + 1) for count, tokens in known)

    def trusted(self, prompts: Sequence[Hashable]) -> tuple[float, ...]:
        """`predict`, once it has been seen how far that is to be trusted: () before."""
        return self.predict(prompts) if self.ratios else ()

    def observe(
        self, prompts: Sequence[Hashable], lengths: Sequence[int], window: int = 2048
    ) -> None:
        """Take note of the responses of an iteration."""
        predicted = self.predict(prompts)
        if predicted:
            pairs = zip(prompts, lengths, predicted, strict=True)
            new = [length / expected for key, length, expected in pairs if key in self._seen]
            self.ratios = (*self.ratios, *new)[-window:]
        for prompt, length in zip(prompts, lengths, strict=True):
            count, tokens = self._seen.get(prompt, (0, 0))
            self._seen[prompt] = (count + 1, tokens + int(length))
            self._responses += 1
            self._tokens += int(length)
