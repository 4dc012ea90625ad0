"""Where the time of a controller goes: every moment of its thread counts for one thing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any


class Stopwatch:
    """Shares out the time of one thread among `names`; it runs for one of them at a time.

    `with watch.on(name)` it runs for `name`, and before and after for what it ran for. It is
    started and stopped thousands of times a second: one clock only.
    """

    def __init__(self, *names: str) -> None:
        self._spans = {name: _On(self) for name in names}
        self.running = _On(self)  # for nothing
        self.since = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time that it has run for each name, up to when it last was set to another."""
        return {name: span.seconds for name, span in self._spans.items()}

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

    def __init__(self, watch: Stopwatch) -> None:
        self.seconds = 0.0
        self._watch = watch
        self._before: list[_On] = []

    def __enter__(self) -> None:
        watch, now = self._watch, perf_counter()
        before = watch.running
        before.seconds += now - watch.since
        self._before.append(before)
        watch.running, watch.since = self, now

    def __exit__(self, *error: object) -> None:
        watch, now = self._watch, perf_counter()
        self.seconds += now - watch.since
        watch.running, watch.since = self._before.pop(), now


class Timed:
    """`inner`, with the watch running for `name` in the methods named."""

    def __init__(self, inner: Any, methods: Sequence[str], watch: Stopwatch, name: str) -> None:
        self._inner = inner
        for method in methods:
            setattr(self, method, watch.timed(name, getattr(inner, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
