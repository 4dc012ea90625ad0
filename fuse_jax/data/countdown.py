"""The built-in task: count down by a fixed step. Verifiable, long-tailed, learnable in minutes.

A prompt is three tokens, step, floor, start; the answer goes on from the last of them:

    -7 >=3 31  →  24 17 10 3 <stop>

(start - step, start - 2·step, … while not below the floor). Answer lengths over all prompts have
a natural long tail (small steps): with the default sizes median 4, mean 5.9, 99th percentile 26,
maximum 32 tokens. `gold` is exact, so what PPO does behind the reward model's back can be seen;
neither PPO nor the reward model is ever given it.

Demonstrations are imperfect on purpose: differences slip and the slip is carried on, as a person
would, and some stop early, so that a policy that imitates them is right about half the time and
there is something left to improve by preferences.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fuse_jax.data.order import permutation
from fuse_jax.data.records import (
    DataError,
    Demonstration,
    Preference,
    Prompt,
    TokenIds,
    token_array,
)

PAD, STOP = 0, 1
_FIRST_NUMBER = 2
# A wrong difference: off by one (twice as likely), by two, or by a lost borrow.
_SLIPS = (-2, -1, -1, 1, 1, 2, 10, -10)
# Fixes the held-out split for good: it must not move with the run's seed.
_SPLIT_SEED = 1234


class Problem(NamedTuple):
    """Count down from `start` by `step`, not below `floor`; `given` terms already stand there."""

    start: int
    step: int
    floor: int
    given: int = 0

    def terms(self) -> list[int]:
        """The terms still to be said, in order (at least one)."""
        return list(range(self.start - (1 + self.given) * self.step, self.floor - 1, -self.step))


@dataclasses.dataclass(frozen=True)
class Countdown:
    """The task at given sizes; also its own tokenizer (`Vocabulary`). All draws are from `rng`s.

    Numbers are 0 … top-1, one token each; steps and floors have token sets of their own.
    `max_given` > 0 puts up to that many first terms of the chain into the prompt, so that prompt
    lengths differ (3 … 3 + max_given); how many is fixed per problem.
    """

    top: int = 32
    min_step: int = 1
    max_step: int = 6
    held_out: int = 500
    max_response: int = 36
    slip: float = 0.14
    early_stop: float = 0.04
    max_given: int = 0

    def __post_init__(self):
        if not 1 <= self.min_step <= self.max_step < self.top:
            raise DataError(f"countdown needs 1 <= min_step <= max_step < top, got {self}")
        if self.max_response < self.top:
            raise DataError(f"countdown: max_response must be at least top ({self.top})")
        if not (0 <= self.slip < 1 and 0 <= self.early_stop < 1 and self.max_given >= 0):
            raise DataError(f"countdown needs slip, early_stop in [0, 1), max_given >= 0: {self}")
        if not 0 < self.held_out < len(self.problems()):
            raise DataError(
                f"countdown: held_out={self.held_out} of {len(self.problems())} problems leaves "
                "no training or no held-out prompts: change held_out or top"
            )

    @property
    def vocab_size(self) -> int:
        """Pad, stop, numbers, floors, steps."""
        return 2 + 2 * self.top + (self.max_step - self.min_step + 1)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The one stop token."""
        return (STOP,)

    @property
    def pad_token_id(self) -> int:
        """Never sampled in a well-trained model, but it may be: it is a token like others."""
        return PAD

    def prompt_tokens(self, problem: Problem) -> list[int]:
        """[step, floor, start, terms given …]: the last one is where the answer goes on."""
        given = [problem.start - i * problem.step for i in range(problem.given + 1)]
        return [
            _FIRST_NUMBER + 2 * self.top + problem.step - self.min_step,
            _FIRST_NUMBER + self.top + problem.floor,
            *(_FIRST_NUMBER + number for number in given),
        ]

    def decode(self, tokens: TokenIds) -> str:
        """Readable text: prompt `-7 >=3 31`, answer `24 17 10 3`; the stop token is not shown."""
        words = []
        for token in map(int, tokens):
            number = token - _FIRST_NUMBER
            if not 0 <= token < self.vocab_size:
                raise DataError(f"token {token} is outside the vocabulary of {self.vocab_size}")
            if token == PAD:
                words.append("<pad>")
            elif 0 <= number < self.top:
                words.append(str(number))
            elif self.top <= number < 2 * self.top:
                words.append(f">={number - self.top}")
            elif number >= 2 * self.top:
                words.append(f"-{number - 2 * self.top + self.min_step}")
        return " ".join(words)

    def problems(self) -> list[Problem]:
        """Every problem with at least one term to say, in a fixed order; the index is its id."""
        all_problems = []
        for start in range(self.top):
            for step in range(self.min_step, self.max_step + 1):
                for floor in range(start - step + 1):
                    given = 0
                    if self.max_given:  # spread over lengths, one term at least left to say
                        terms = (start - floor) // step
                        given = min((start + step + floor) % (self.max_given + 1), terms - 1)
                    all_problems.append(Problem(start, step, floor, given))
        return all_problems

    def train_prompts(self) -> list[Prompt]:
        """Prompts to train on; `meta["terms"]` is the right answer's number of terms."""
        return list(_prompts(self)[0])

    def held_out_prompts(self) -> list[Prompt]:
        """Prompts no stage is trained on; the same ones for every seed."""
        return list(_prompts(self)[1])

    def problem_of(self, prompt: TokenIds) -> Problem:
        """The problem a prompt's tokens state."""
        ids = [int(token) for token in prompt]
        if len(ids) >= 3:
            step, floor, start = (token - _FIRST_NUMBER for token in ids[:3])
            step, floor = step - 2 * self.top + self.min_step, floor - self.top
            problem = Problem(start, step, floor, given=len(ids) - 3)
            known = start < self.top and self.min_step <= step <= self.max_step and floor >= 0
            if known and problem.terms() and self.prompt_tokens(problem) == ids:
                return problem
        raise DataError(f"not a countdown prompt: {ids}")

    def clean(self, prompt: TokenIds) -> list[int]:
        """The right answer's tokens, stop token included."""
        return self._said(self.problem_of(prompt).terms())

    def gold(self, prompt: TokenIds, response: TokenIds) -> bool:
        """Whether a response (cut behind its stop token) is exactly right. Never a reward."""
        return [int(token) for token in response] == self.clean(prompt)

    def imperfect(
        self, prompt: TokenIds, rng: np.random.Generator, slip: float, early_stop: float
    ) -> list[int]:
        """An answer where each step slips, or is the last, with these probabilities."""
        problem = self.problem_of(prompt)
        value = problem.start - problem.given * problem.step
        return self._said(self._chain(value, problem, rng, slip, early_stop))

    def corrupted(self, prompt: TokenIds, rng: np.random.Generator) -> list[int]:
        """A wrong answer, never equal to the clean one.

        Half of them slip once and carry it on, 1/6 stop early, 1/12 leave a term out, 1/12 go on
        past the floor, 1/6 do several such things at once.
        """
        problem, good = self.problem_of(prompt), self.problem_of(prompt).terms()
        while True:
            kind, at = int(rng.integers(12)), int(rng.integers(len(good)))
            if kind < 6:
                value = self._slipped(good[at], rng)
                bad = [*good[:at], value, *self._chain(value, problem, rng, 0.0, 0.0)]
            elif kind < 8:
                bad = good[:at]
            elif kind == 8:
                bad = good[:at] + good[at + 1 :]
            elif kind == 9:
                beyond = range(1, int(rng.integers(1, 4)) + 1)
                bad = good + [max(0, good[-1] - problem.step * i) for i in beyond]
            else:
                value = good[0] + problem.step
                bad = self._chain(value, problem, rng, 0.15, 0.05)
            if bad != good and len(bad) < self.max_response:
                return self._said(bad)

    def _said(self, numbers: list[int]) -> list[int]:
        return [*(_FIRST_NUMBER + number for number in numbers), STOP]

    def _slipped(self, number: int, rng: np.random.Generator) -> int:
        return min(max(number + _SLIPS[rng.integers(len(_SLIPS))], 0), self.top - 1)

    def _chain(
        self,
        value: int,
        problem: Problem,
        rng: np.random.Generator,
        slip: float,
        early_stop: float,
    ) -> list[int]:
        """Terms said from `value` on; a slipped term is where the next one counts from."""
        said: list[int] = []
        while value - problem.step >= problem.floor and len(said) < self.max_response - 1:
            value -= problem.step
            if slip and rng.random() < slip:
                value = self._slipped(value, rng)
            said.append(value)
            if early_stop and rng.random() < early_stop:
                break
        return said

    def demonstrations(
        self,
        count: int,
        rng: np.random.Generator,
        *,
        prompts: Sequence[Prompt] | None = None,
        slip: float | None = None,
        early_stop: float | None = None,
    ) -> list[Demonstration]:
        """Imperfect answers to prompts drawn (with replacement) from `prompts`, default training.

        `slip=0, early_stop=0` gives clean ones; None means the task's own rates.
        """
        slip = self.slip if slip is None else slip
        early_stop = self.early_stop if early_stop is None else early_stop
        return [
            Demonstration(p.tokens, token_array(self.imperfect(p.tokens, rng, slip, early_stop)))
            for p in self._drawn(count, rng, prompts)
        ]

    def preferences(
        self, count: int, rng: np.random.Generator, *, prompts: Sequence[Prompt] | None = None
    ) -> list[Preference]:
        """Pairs of the clean and a corrupted answer, to prompts drawn as for demonstrations."""
        return [
            Preference(
                p.tokens,
                token_array(self.clean(p.tokens)),
                token_array(self.corrupted(p.tokens, rng)),
            )
            for p in self._drawn(count, rng, prompts)
        ]

    def _drawn(
        self, count: int, rng: np.random.Generator, prompts: Sequence[Prompt] | None
    ) -> list[Prompt]:
        pool = self.train_prompts() if prompts is None else prompts
        return [pool[index] for index in rng.integers(len(pool), size=count).tolist()]


@functools.lru_cache(maxsize=8)
def _prompts(task: Countdown) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """(training, held-out) prompts by id; cached, for a trainer draws from them at every step."""
    prompts = []
    for index, problem in enumerate(task.problems()):
        tokens = task.prompt_tokens(problem)
        meta = {"terms": len(problem.terms())}
        prompts.append(Prompt(index, token_array(tokens), task.decode(tokens), meta))
    held_out = set(permutation(len(prompts), _SPLIT_SEED)[: task.held_out].tolist())
    return (
        tuple(p for p in prompts if p.id not in held_out),
        tuple(p for p in prompts if p.id in held_out),
    )
