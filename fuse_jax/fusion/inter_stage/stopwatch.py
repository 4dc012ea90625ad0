"""How long a controller sleeps, and how long it is in calls that dispatch or read."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any


class Stopwatch:
    """Runs within `with`; one within another counts once. For one thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth, self._since = 0, 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._since = time.perf_counter()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._since

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with the watch running while it does."""

        @functools.wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            if self._depth:
                return function(*args, **options)
            self._depth, since = 1, time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self._depth = 0
                self.seconds += time.perf_counter() - since

        return wrapped


class Timed:
    """`inner`, with the watch running in the methods named."""

    def __init__(self, inner: Any, methods: Sequence[str], watch: Stopwatch) -> None:
        self._inner = inner
        for name in methods:
            setattr(self, name, watch.timed(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
