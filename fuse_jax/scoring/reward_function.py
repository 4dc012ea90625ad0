"""Scores of texts by a Python function of the user's, which may do anything.

A function named by its import path runs in worker processes and is killed when it takes too long.
Whatever goes wrong excludes that one sample, is counted under its kind, and is shown once a kind.
"""

from __future__ import annotations

import atexit
import collections
import pickle
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from absl import logging

from fuse_jax.scoring import reward_call
from fuse_jax.scoring.reward_call import Outcome
from fuse_jax.scoring.worker_pool import WorkerPool

KEY = "reward.function"


@dataclass(frozen=True)
class RewardResult:
    """What a sample got. Not `valid`: `score` is NaN, and `reason` says why it is excluded.

    Reasons begin with one of: timeout, exception, not finite, not a number, worker died.
    """

    score: float
    valid: bool
    reason: str = ""
    seconds: float = 0.0


class RewardFunction:
    """Calls `name(prompt: str, response: str, meta: dict) -> float` for samples as they come.

    `submit` never waits for a worker and `poll` for nothing, so that generation goes on; both may
    be called from any thread. Close it, or use it in a `with` statement.

    Attributes:
      calls: results so far.
      excluded: how many of them are not valid, by kind.
      first_traceback: of the first call that raised, or "".
    """

    def __init__(
        self, function: str | Callable, *, workers: int = 2, timeout: float = 10.0
    ) -> None:
        """Args:
          function: "package.module:name" or "path/to/file.py:name", run in `workers` processes; or
            a callable, run in this process without a time limit.
          timeout: seconds a sample may take, apart from importing the function's module.

        Raises:
          ValueError: naming `reward.function` (or its neighbour) and the fix.
        """
        if workers < 1:
            raise ValueError(f"reward.workers={workers} must be at least 1")
        if not timeout > 0:
            raise ValueError(f"reward.timeout={timeout} must be a positive number of seconds")
        self.calls = 0
        self.excluded: collections.Counter[str] = collections.Counter()
        self.first_traceback = ""
        self._open: set[Hashable] = set()
        self._ready: dict[Hashable, RewardResult] = {}
        self._failure = ""
        self._changed = threading.Condition()
        self._function = None
        self._pool = None
        if callable(function):
            self._function = function
            warnings.warn(
                "the reward function runs in this process: it has no time limit and holds up "
                "generation. Name it by its import path to run it in worker processes.",
                stacklevel=2,
            )
            return
        try:
            reward_call.split_path(function)
            self._pool = WorkerPool(function, workers, timeout, self._deliver)
        except ValueError as error:
            raise ValueError(f"{KEY}={function!r}: {error}") from None
        atexit.register(self.close)

    def submit(self, key: Hashable, prompt: str, response: str, meta: dict) -> None:
        """Ask for a score, to be had under `key` (a sample id).

        Raises:
          ValueError: `key` has a result that nobody took yet. RuntimeError: closed, or failed.
        """
        if key is None:
            raise ValueError("key must not be None")
        with self._changed:
            if self._failure:
                raise RuntimeError(f"{KEY}: {self._failure}")
            if key in self._open or key in self._ready:
                raise ValueError(f"a score is already asked for under key {key!r}")
            self._open.add(key)
        if self._function is not None:
            self._deliver(key, reward_call.call(self._function, prompt, response, meta), 0.0)
            return
        assert self._pool is not None
        try:
            body = pickle.dumps((prompt, response, meta), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickle raises many kinds
            self._deliver(key, reward_call.failed(error), 0.0)
            return
        self._pool.submit(key, body)

    def poll(self) -> dict[Hashable, RewardResult]:
        """Results that came since the last call, by key. Never waits.

        Raises RuntimeError if calls are open that nothing will ever answer.
        """
        with self._changed:
            ready, self._ready = self._ready, {}
            if not ready:
                self._check_alive()
            return ready

    def collect(self, keys: Iterable[Hashable]) -> list[RewardResult]:
        """Results of `keys` in their order; waits for them, at most as long as time limits allow.

        Raises:
          KeyError: nothing was submitted under a key, or its result was already taken.
          RuntimeError: closed, or the workers can't be started any more.
        """
        keys = list(keys)
        with self._changed:
            unknown = [k for k in keys if k not in self._open and k not in self._ready]
            if unknown:
                raise KeyError(f"no open call under key {unknown[0]!r}")
            while any(key in self._open for key in keys):
                self._check_alive()
                self._changed.wait()
            return [self._ready.pop(key) for key in keys]

    def score(self, calls: Sequence[tuple[str, str, dict]]) -> list[RewardResult]:
        """Results of (prompt, response, meta) triples, in order. Waits."""
        keys = [("score", object()) for _ in calls]
        for key, arguments in zip(keys, calls, strict=True):
            self.submit(key, *arguments)
        return self.collect(keys)

    def summary(self) -> str:
        """One line: how many samples were excluded, and why."""
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.excluded.most_common())
        return f"reward function: {self.excluded.total()} of {self.calls} samples excluded" + (
            f" ({kinds})" if kinds else ""
        )

    def close(self) -> None:
        """Kill the workers; open calls are given up, and waiting for them raises."""
        if self._pool is not None:
            self._pool.close()
            atexit.unregister(self.close)

    def __enter__(self) -> RewardFunction:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        if self._failure and self._open:
            raise RuntimeError(f"{KEY}: {len(self._open)} calls are lost: {self._failure}")

    def _deliver(self, key: Hashable, outcome: Outcome, seconds: float) -> None:
        """Take a result (from the pool's thread or this one); key None: there will be no more."""
        with self._changed:
            if key is None:
                self._failure = outcome.reason
            else:
                self._open.remove(key)
                self.calls += 1
                self._ready[key] = _result(outcome, seconds)
                if outcome.kind:
                    self._show(outcome)
            self._changed.notify_all()

    def _show(self, outcome: Outcome) -> None:
        self.excluded[outcome.kind] += 1
        self.first_traceback = self.first_traceback or outcome.trace
        if self.excluded[outcome.kind] == 1:
            logging.warning(
                "a sample is excluded, its reward function gave: %s\n%s(shown once a kind)",
                outcome.reason,
                outcome.trace,
            )


def _result(outcome: Outcome, seconds: float) -> RewardResult:
    return RewardResult(outcome.score, not outcome.kind, outcome.reason, seconds)


def check_reward_function(function: str) -> None:
    """Load `function` in a worker, as a run would, and end the worker again.

    Raises ValueError naming `reward.function`, what is wrong and the fix.
    """
    RewardFunction(function, workers=1).close()
