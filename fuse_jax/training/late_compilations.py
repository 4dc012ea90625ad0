"""Noticing what is compiled when nothing should be any more.

jax writes the name and the shapes of each program it compiles to a logger, at debug level;
listening there costs nothing until something is compiled.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = "jax._src.interpreters.pxla"
COMPILING = re.compile(r"Compiling (.*) with global shapes and types (.*?)\. Argument mapping")


class _Listener(logging.Handler):
    def __init__(self, seen: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        found = COMPILING.match(record.getMessage())
        if found:
            self._seen.append(f"{found[1]} {found[2]}")


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that gets "name shapes" of every program compiled inside (cached ones included)."""
    seen: list[str] = []
    logger, listener = logging.getLogger(LOGGER), _Listener(seen)
    before = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield seen
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before[0])
        logger.propagate = before[1]
