"""From an `ml_collections.ConfigDict` to a `Config`; every refusal names the key and the fix.

In a ConfigDict a tuple is a comma-separated string (`--config.stages=ppo`,
`--config.compute.sequence_buckets=32,64`), and a setting that may be absent is a placeholder.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict

from fuse_jax.config import Config


class ConfigError(ValueError):
    """A setting that cannot run. The message starts with its key."""


def default_config() -> ConfigDict:
    """All settings at their defaults, for `configs/*.py` to change."""
    return _to_dict(Config())


def _to_dict(value: Any) -> ConfigDict:
    out = ConfigDict()
    hints = typing.get_type_hints(type(value))
    for entry in dataclasses.fields(value):
        current, hint = getattr(value, entry.name), hints[entry.name]
        if entry.name == "rope_scaling":  # a property of published models, read from their files
            continue
        if dataclasses.is_dataclass(current):
            out[entry.name] = _to_dict(current)
        elif isinstance(current, tuple):
            out[entry.name] = ",".join(str(item) for item in current)
        elif _optional(hint) is not None:
            out[entry.name] = config_dict.placeholder(_optional(hint))
            if current is not None:
                out[entry.name] = current
        else:
            out[entry.name] = current
    return out


def _optional(hint: Any) -> type | None:
    """T of `T | None`, else None."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [item for item in typing.get_args(hint) if item is not type(None)]
        return inner[0]
    return None


def read_config(settings: ConfigDict | dict[str, Any]) -> Config:
    """Build the dataclasses, checking every key, type and choice. Raises ConfigError."""
    return _from_dict(Config, dict(settings), "")


def _from_dict(kind: type, settings: dict[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {entry.name for entry in dataclasses.fields(kind)}
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            advice = f"did you mean {prefix}{near[0]}?" if near else f"keys here: {sorted(known)}"
            raise ConfigError(f"{prefix}{key}: no such key; {advice}")
    values = {key: _value(hints[key], item, prefix + key) for key, item in settings.items()}
    try:
        return kind(**values)
    except ValueError as error:  # checks of the dataclass itself
        raise ConfigError(f"{prefix.rstrip('.')}: {error}") from error


def _value(hint: Any, item: Any, key: str) -> Any:
    optional = _optional(hint)
    if optional is not None:
        return None if item is None else _value(optional, item, key)
    if dataclasses.is_dataclass(hint):
        if not isinstance(item, (ConfigDict, dict)):
            raise ConfigError(f"{key}={item!r}: a group of settings is expected here")
        return _from_dict(typing.cast(type, hint), dict(item), key + ".")
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        choices = typing.get_args(hint)
        if item not in choices:
            raise ConfigError(f"{key}={item!r}: use one of {', '.join(map(repr, choices))}")
        return item
    if origin is tuple:
        return _tuple(typing.get_args(hint)[0], item, key)
    if hint is float and isinstance(item, int) and not isinstance(item, bool):
        return float(item)
    if not isinstance(item, hint) or (hint is int and isinstance(item, bool)):
        raise ConfigError(f"{key}={item!r}: expected {hint.__name__}, got {type(item).__name__}")
    return item


def _tuple(kind: type, item: Any, key: str) -> tuple:
    pieces = item.split(",") if isinstance(item, str) else list(item)
    try:
        return tuple(kind(str(piece).strip()) for piece in pieces if str(piece).strip())
    except ValueError as error:
        raise ConfigError(
            f"{key}={item!r}: expected {kind.__name__} values separated by commas"
        ) from error


def refused_flags(argv: Sequence[str], error: Exception) -> str:
    """One line for what the flags' parser raised: the argument at fault, and what is wrong."""
    reason = " ".join(str(error).replace("\\n", " ").split())
    if isinstance(error, (AttributeError, KeyError)):
        wrong = re.findall(r"\w+", reason)[:1]
        given = [arg for arg in argv if arg.startswith("--config.")]
        at_fault = [arg for arg in given if set(wrong) & set(re.split(r"[.=]", arg))]
        named = (at_fault or given or [""])[0]
        return f"{named}: no such setting ({reason}): the keys are those of fuse_jax/config.py"
    return reason


def check_recipe(argv: Sequence[str]) -> None:
    """Refuse a recipe that is no file, before the flags' parser hides that in a traceback."""
    pairs = zip(argv, [*argv[1:], ""])
    recipes = [
        b if a in ("--config", "-config") else a.partition("=")[2]
        for a, b in pairs
        if re.fullmatch(r"--?config(=.*)?", a)
    ]
    for recipe in recipes:
        path = recipe.partition(":")[0]  # what follows is an argument of its get_config
        if not Path(path).is_file():
            raise ConfigError(f"--config={recipe}: no such file: name a recipe, as in configs/")
