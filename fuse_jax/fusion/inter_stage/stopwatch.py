"""Where the time of a controller goes: every moment of its thread counts for one thing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any


class Stopwatch:
    """Shares out the time of one thread among `names`; it runs for one of them at a time.

    `with watch.on(name)` it runs for `name`, and before and after for what it ran for. `seconds` is
    the wall time of each. It is started and stopped thousands of times a second: one clock only.
    """

    def __init__(self, *names: str) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self.running: str | None = None
        self.since = 0.0
        self._spans = {name: _On(self, name) for name in names}

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


class _On:
    """See `Stopwatch.on`. One for each name, used again and again."""

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name
        self._before: list[str | None] = []

    def __enter__(self) -> None:
        watch, now = self._watch, time.perf_counter()
        before = watch.running
        if before is not None:
            watch.seconds[before] += now - watch.since
        self._before.append(before)
        watch.running, watch.since = self._name, now

    def __exit__(self, *error: object) -> None:
        watch, now = self._watch, time.perf_counter()
        watch.seconds[self._name] += now - watch.since
        watch.running, watch.since = self._before.pop(), now


class Timed:
    """`inner`, with the watch running for `name` in the methods named."""

    def __init__(self, inner: Any, methods: Sequence[str], watch: Stopwatch, name: str) -> None:
        self._inner = inner
        for method in methods:
            setattr(self, method, watch.timed(name, getattr(inner, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
