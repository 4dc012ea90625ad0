"""Where the time of a controller goes: every moment of its thread counts for one thing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any


class Stopwatch:
    """Shares out the time of one thread among `names`; it runs for one of them at a time.

    `with watch.on(name)` it runs for `name`, and before and after for what it ran for. `seconds` is
    wall time of each, `cpu` the part of it that this thread had a core for.
    """

    def __init__(self, *names: str) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self.cpu = dict.fromkeys(names, 0.0)
        self._spans = {name: _On(self, name) for name in names}
        self._running: list[str] = []
        self._since, self._cpu_since = 0.0, 0.0

    def on(self, name: str) -> _On:
        """Runs for `name` within `with`."""
        return self._spans[name]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with the watch running for `name` while it does."""
        span = self._spans[name]

        @functools.wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            with span:
                return function(*args, **options)

        return wrapped

    def enter(self, name: str) -> None:
        """From now on it runs for `name`."""
        self._lap()
        self._running.append(name)

    def leave(self) -> None:
        """From now on it runs for what it ran for before."""
        self._lap()
        self._running.pop()

    def _lap(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        if self._running:
            name = self._running[-1]
            self.seconds[name] += now - self._since
            self.cpu[name] += cpu - self._cpu_since
        self._since, self._cpu_since = now, cpu


class _On:
    """See `Stopwatch.on`. One for each name, used again and again."""

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._watch.enter(self._name)

    def __exit__(self, *error: object) -> None:
        self._watch.leave()


class Timed:
    """`inner`, with the watch running for `name` in the methods named."""

    def __init__(self, inner: Any, methods: Sequence[str], watch: Stopwatch, name: str) -> None:
        self._inner = inner
        for method in methods:
            setattr(self, method, watch.timed(name, getattr(inner, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
