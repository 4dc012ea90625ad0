"""Problems from files: JSON, or Python with `get_config()`; keys overridden by dotted path."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fuse_jax.fusion.intra_stage.problem import (
    MODELS,
    Pipeline,
    Problem,
    ProblemError,
    UnknownKeyError,
)


class ProblemFileError(ProblemError):
    """A file that is not there or holds no problem; the message names the path and the place."""


def load_problem(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Problem:
    """Read a problem and apply overrides.

    Args:
      path: `*.json` as `Problem.to_json` writes it (or a schedule's JSON, whose problem is taken),
        or `*.py` whose `get_config()` returns the same as a dict or ConfigDict.
      overrides: (dotted key, value as JSON text or a bare word), for example ("actor.lag", "0.2"),
        ("memory_cap", "null"), ("critic.direction", "up").

    Raises:
      ProblemFileError: no such file, no JSON, no `get_config`.
      ProblemError: see `Problem.from_dict`; overrides raise UnknownKeyError by the same rules.
    """
    content = _read(Path(path))
    for key, text in overrides:
        _override(content, key, text)
    return Problem.from_dict(content)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ProblemFileError(f"problem file {path}: no such file")
    if path.suffix == ".py":
        try:
            make = runpy.run_path(str(path)).get("get_config")
            content: Any = make() if callable(make) else None
        except Exception as error:  # whatever a user's file raises
            said = f"{type(error).__name__}: {error}"
            raise ProblemFileError(f"problem file {path} raises {said}") from error
        if not callable(make):
            raise ProblemFileError(f"problem file {path}: define get_config(), returning a dict")
        content = content.to_dict() if hasattr(content, "to_dict") else content
    else:
        try:
            content = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ProblemFileError(f"problem file {path} is not JSON: {error}") from None
    if isinstance(content, Mapping) and "order" in content and "problem" in content:
        content = content["problem"]
    if not isinstance(content, Mapping):
        raise ProblemFileError(f"problem file {path}: must hold an object with keys actor, critic")
    return {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in content.items()
    }


def _override(content: dict[str, Any], key: str, text: str) -> None:
    """Set one key of a problem or of a model in place."""
    model, dot, name = key.partition(".")
    if dot and model not in MODELS:
        raise UnknownKeyError(f"problem.{key}: must start with {' or '.join(MODELS)}, or be a key")
    kind = Pipeline if dot else Problem
    name = name if dot else key
    known = [field.name for field in fields(kind) if field.name not in MODELS]
    if name not in known:
        keys = [f"{model}.{field}" for field in known] if dot else known
        raise UnknownKeyError(f"problem has no key {key!r}; known keys: {', '.join(keys)}")
    part = content.setdefault(model, {}) if dot else content
    if not isinstance(part, dict):
        raise UnknownKeyError(f"problem.{key}: {model} is {part!r}, must be a mapping")
    try:
        part[name] = json.loads(text)
    except json.JSONDecodeError:
        part[name] = text


def split_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """[(dotted key, text)] of `--problem.key=value` (or `--problem.key value`) words.

    Raises ValueError naming the first word that is neither.
    """
    overrides, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if not key.startswith("--problem.") or not (equals or rest):
            raise ValueError(f"not understood: {word} (a problem's key is --problem.key=value)")
        overrides.append((key.removeprefix("--problem."), value if equals else rest.pop(0)))
    return overrides
