"""One call of a reward function, and what may be wrong with it.

Standard library only: worker processes import this, and the trainer for functions that it runs
itself.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FLOAT32_MAX = 3.4028234663852886e38
TRACEBACK_LIMIT = 4000  # characters kept of a traceback, its end
REASON_LIMIT = 300  # characters kept of an exception's text


class Outcome(NamedTuple):
    """`score` if `kind` is '', else NaN. `reason` begins with `kind`; `trace` is a traceback."""

    score: float
    kind: str = ""
    reason: str = ""
    trace: str = ""


def call(function: Callable, prompt: str, response: str, meta: dict) -> Outcome:
    """`function(prompt, response, meta)`, whatever it does short of ending the process."""
    try:
        result = function(prompt, response, meta)
        return _checked(result)
    except BaseException as error:  # sys.exit() and KeyboardInterrupt must not end the worker
        return failed(error)


def failed(error: BaseException) -> Outcome:
    """The outcome of a call that raised `error`."""
    kind = "exception"
    try:
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
    except Exception:  # an exception whose own __str__ raises
        text = trace = type(error).__name__
    return Outcome(math.nan, kind, f"{kind}: {text[:REASON_LIMIT]}", trace[-TRACEBACK_LIMIT:])


def _checked(result: Any) -> Outcome:
    if getattr(result, "shape", None) == () and hasattr(result, "item"):
        result = result.item()  # a numpy scalar, of any dtype
    if not isinstance(result, numbers.Real):
        kind = "not a number"
        return Outcome(math.nan, kind, f"{kind}: {type(result).__name__}")
    score = float(result)
    # Scores become float32: what overflows there is as good as inf. NaN fails the comparison too.
    if not abs(score) <= FLOAT32_MAX:
        kind = "not finite"
        return Outcome(math.nan, kind, f"{kind}: {score}")
    return Outcome(score)


def split_path(path: str) -> tuple[str, str]:
    """`module, name` of "package.module:name", or `file, name` of "path/to/file.py:name".

    Raises ValueError if `path` is neither.
    """
    module, colon, name = path.rpartition(":")
    is_file = module.endswith(".py")
    dotted = all(part.isidentifier() for part in module.split("."))
    if not colon or not name.isidentifier() or not (is_file or dotted):
        raise ValueError(
            "it must be 'package.module:name' or 'path/to/file.py:name', the name of a function "
            "called as name(prompt, response, meta)"
        )
    return module, name


def load(path: str) -> Callable:
    """Import the function that `path` names.

    Raises ValueError saying what is wrong and what to do: no such module, file or name, an error
    in the module, or something that cannot be called as name(prompt, response, meta).
    """
    source, name = split_path(path)
    if source.endswith(".py") and not Path(source).is_file():
        raise ValueError(f"there is no file {source}: paths are taken from the working directory")
    try:
        module = _import_file(source) if source.endswith(".py") else importlib.import_module(source)
    except BaseException as error:
        why = f"{source} can't be imported ({type(error).__name__}: {error})"
        if isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{why}: put its directory on PYTHONPATH, or give 'path/to/file.py:{name}'"
            ) from error
        raise ValueError(f"{why}: mend it\n{failed(error).trace}") from error
    function = getattr(module, name, None)
    if function is None:
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = difflib.get_close_matches(name, public, n=3) or public[:8]
        raise ValueError(f"{source} has no {name!r}: did you mean one of {near}?")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"{name!r} in {source} is no plain function: {function!r}")
    try:
        inspect.signature(function).bind("", "", {})
    except TypeError as error:
        raise ValueError(
            f"{name!r} in {source} can't be called as {name}(prompt, response, meta): {error}"
        ) from error
    except ValueError:  # a builtin without a signature: the first call will tell
        pass
    return function


def _import_file(file: str) -> Any:
    name = "_reward_function_file"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up there
    spec.loader.exec_module(module)
    return module
