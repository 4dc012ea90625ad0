"""One score a sample, from the reward model or from a reward function, in one form."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Model, Role, Scored
from fuse_jax.scoring.reward_function import RewardFunction, RewardResult
from fuse_jax.scoring.scorer import Scorer


def model_results(scored: Sequence[Scored]) -> list[RewardResult]:
    """The reward model's scores; one that is not finite excludes its sample.

    Raises ValueError if the scorer was not asked for `scores`.
    """
    results = []
    for one in scored:
        if one.score is None:
            raise ValueError("samples have no score: ask the scorer for the column 'scores'")
        finite = math.isfinite(one.score)
        reason = "" if finite else f"not finite: {one.score}"
        results.append(RewardResult(one.score if finite else math.nan, finite, reason))
    return results


def count_excluded(results: Iterable[RewardResult]) -> collections.Counter[str]:
    """How many results are not valid, by kind: timeout, exception, not finite, …"""
    return collections.Counter(r.reason.split(":")[0] for r in results if not r.valid)


class TextRewards:
    """A reward function applied to the text of samples; keyed by `sample_id`."""

    def __init__(
        self,
        function: RewardFunction,
        decode: Callable[[Sequence[int]], str],
        prompt_text: Callable[[Sample], str] | None = None,
    ) -> None:
        """Args:
        decode: text of token ids, special tokens left out (`Vocabulary.decode`).
        prompt_text: the prompt as the function shall see it; None = its tokens decoded.
        """
        self.function = function
        self._decode = decode
        self._prompt_text = prompt_text or (lambda sample: decode(sample.prompt_tokens.tolist()))

    def submit(self, samples: Iterable[Sample]) -> None:
        """Ask for the samples' scores without waiting for them."""
        for sample in samples:
            response = self._decode(sample.response_tokens.tolist())
            self.function.submit(sample.sample_id, self._prompt_text(sample), response, sample.meta)

    def collect(self, samples: Iterable[Sample]) -> list[RewardResult]:
        """Their results, in this order; waits (`self.function.poll()` does not)."""
        return self.function.collect([sample.sample_id for sample in samples])


def score_samples(
    samples: Sequence[Sample],
    scorer: Scorer,
    models: Mapping[Role, Model],
    text_rewards: TextRewards | None = None,
) -> tuple[list[Scored], list[RewardResult]]:
    """All columns and the reward of every sample, in order; devices and reward workers overlap.

    Rewards come from `text_rewards` where it is given, else from the scorer's column `scores`.
    """
    submission = scorer.submit(samples, models)
    if text_rewards is not None:
        text_rewards.submit(samples)
    scored = scorer.collect(submission)
    if text_rewards is not None:
        return scored, text_rewards.collect(samples)
    return scored, model_results(scored)
