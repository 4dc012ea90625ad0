"""How long a controller sleeps, and how long it is in calls that dispatch or read."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any


class Stopwatch:
    """Runs within `with`; one within another counts once. For one thread.

    `seconds` is wall time, `cpu` the part of it that this thread had a core for.
    """

    def __init__(self) -> None:
        self.seconds, self.cpu = 0.0, 0.0
        self._depth, self._since, self._cpu_since = 0, 0.0, 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._since, self._cpu_since = time.perf_counter(), time.thread_time()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._since
            self.cpu += time.thread_time() - self._cpu_since

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with the watch running while it does."""

        @functools.wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            with self:
                return function(*args, **options)

        return wrapped


class Timed:
    """`inner`, with the watch running in the methods named."""

    def __init__(self, inner: Any, methods: Sequence[str], watch: Stopwatch) -> None:
        self._inner = inner
        for name in methods:
            setattr(self, name, watch.timed(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
