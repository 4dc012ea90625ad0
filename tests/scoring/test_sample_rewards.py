"""One score a sample, whether from the reward model or from a function of its text."""

import math
from pathlib import Path

import numpy as np
import pytest

from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Scored
from fuse_jax.scoring.reward_function import RewardFunction
from fuse_jax.scoring.sample_rewards import (
    TextRewards,
    count_excluded,
    model_results,
    score_samples,
)

EXAMPLES = Path(__file__).with_name("reward_examples.py")


class StandIn:
    """A scorer that answers with each sample's length and notes what was called."""

    def __init__(self):
        self.calls = []

    def submit(self, samples, models):
        self.calls.append("submit")
        return list(samples)

    def collect(self, submission):
        self.calls.append("collect")
        return [Scored(score=float(s.length)) for s in submission]


def sample(sample_id: int, prompt: list[int], response: list[int]) -> Sample:
    logs = np.zeros(len(response), np.float32)
    return Sample(sample_id, np.array(prompt), np.array(response), logs, False, meta={"bonus": 0.5})


SAMPLES = [sample(9, [1, 2], [3]), sample(4, [1], []), sample(7, [5], [6, 7, 8])]


def decode(tokens) -> str:
    return "".join(chr(96 + t) for t in tokens)


def test_from_the_reward_model():
    scored, results = score_samples(SAMPLES, StandIn(), {})
    assert [r.score for r in results] == [3.0, 1.0, 4.0] == [s.score for s in scored]
    assert all(r.valid and not r.reason for r in results)


def test_a_score_that_is_not_finite_excludes_its_sample():
    results = model_results([Scored(score=1.0), Scored(score=math.nan), Scored(score=-math.inf)])
    assert [r.valid for r in results] == [True, False, False]
    assert all(math.isnan(r.score) for r in results[1:])
    assert [r.reason for r in results[1:]] == ["not finite: nan", "not finite: -inf"]
    assert count_excluded(results) == {"not finite": 2}
    with pytest.raises(ValueError, match="column 'scores'"):
        model_results([Scored()])


def test_from_a_function_of_the_text():
    with RewardFunction(f"{EXAMPLES}:length", workers=2) as function:
        rewards = TextRewards(function, decode)
        scorer = StandIn()
        scored, results = score_samples(SAMPLES, scorer, {}, rewards)
        assert [r.score for r in results] == [3.5, 1.5, 4.5]
        assert len(scored) == 3 and scorer.calls == ["submit", "collect"]
        # A sample at a time, as they finish, and in another order.
        for one in reversed(SAMPLES):
            rewards.submit([one])
        assert [r.score for r in rewards.collect(SAMPLES)] == [3.5, 1.5, 4.5]


def test_the_prompt_may_be_shown_in_another_form():
    with pytest.warns(UserWarning):
        function = RewardFunction(lambda prompt, response, meta: float(prompt == "<4>"))
    rewards = TextRewards(function, decode, lambda s: f"<{s.sample_id}>")
    rewards.submit(SAMPLES)
    assert [r.score for r in rewards.collect(SAMPLES)] == [0.0, 1.0, 0.0]
