"""Found schedules on disk, by problem: a plan is searched once and read ever after.

One JSON file a plan, named by the digest of the problem (not its name) and the settings of the
search. A file that does not hold a valid schedule of that problem is an error, never silently
searched again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from absl import logging

from fuse_jax.fusion.intra_stage.bounds import BoundFinder
from fuse_jax.fusion.intra_stage.cost import TransportError
from fuse_jax.fusion.intra_stage.problem import TICKS_PER_MS, Problem, ProblemError, to_quanta
from fuse_jax.fusion.intra_stage.schedule import Schedule, ScheduleError
from fuse_jax.fusion.intra_stage.search import SearchResult, search
from fuse_jax.fusion.intra_stage.search_peak import lower_peak
from fuse_jax.fusion.output import OutputError

# Part of every file's name: raise it when the same settings give other schedules.
FORMAT = 3


class PlanSettingError(ValueError):
    """A setting of a search that cannot be; the message names it, its value and the fix."""


# What a wrong problem, setting or directory raises: one line to the user, not a traceback.
REFUSALS = (OutputError, PlanSettingError, ProblemError, ScheduleError, TransportError)


def default_directory() -> Path:
    """$FUSE_JAX_PLANS, else ~/.cache/fuse_jax/plans. Raises OutputError without a home."""
    named = os.environ.get("FUSE_JAX_PLANS")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "fuse_jax" / "plans"
    except RuntimeError as error:
        raise OutputError(f"{error}: set FUSE_JAX_PLANS to a directory for plans") from error


def plan_path(problem: Problem, settings: dict[str, Any], directory: Path | None = None) -> Path:
    """File of a plan; equal problems with equal settings have the same."""
    text = json.dumps([FORMAT, problem.digest, settings], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return (directory or default_directory()) / f"{digest}.json"


def find_plan(
    problem: Problem,
    *,
    cost_model: str = "ideal",
    evaluations: int = 2_000_000,
    memory_evaluations: int = 0,
    time_limit: float | None = None,
    seed: int = 0,
    directory: Path | None = None,
) -> tuple[SearchResult, bool]:
    """The plan of a problem, and whether it was read from disk.

    Args: as in `search`; memory_evaluations > 0 adds the memory pass (ideal cost model only). A
      result that a time limit had a part in is not stored: another machine might find better.

    Raises:
      PlanSettingError: a budget, time limit or seed that cannot be.
      ScheduleError: the stored file is no valid schedule of the problem (delete it).
    """
    _check_whole("evaluations", evaluations, 1)
    _check_whole("memory_evaluations", memory_evaluations, 0)
    _check_whole("seed", seed, 0)
    if time_limit is not None and not (0 < time_limit < math.inf):
        raise PlanSettingError(f"time_limit={time_limit}: give CPU seconds above 0, or none")
    settings = {
        "cost_model": cost_model,
        "evaluations": evaluations,
        "memory_evaluations": memory_evaluations,
        "seed": seed,
    }
    path = plan_path(problem, settings, directory)
    if _is_there(path):
        return _read(path, problem), True
    found = search(
        problem, cost_model=cost_model, evaluations=evaluations, time_limit=time_limit, seed=seed
    )
    if memory_evaluations:
        found = lower_peak(found, evaluations=memory_evaluations, time_limit=time_limit, seed=seed)
    if not found.clocked:
        try:
            _write(path, found)
        except OSError as error:
            logging.warning(
                "the plan is not kept in %s (%s): set FUSE_JAX_PLANS to a directory to write in",
                path.parent,
                error.strerror or error,
            )
    return found, False


def _is_there(path: Path) -> bool:
    """Whether a plan is stored; in a directory that cannot be looked into there is none."""
    try:
        return path.exists()
    except OSError:
        return False


def _check_whole(name: str, value: int, low: int) -> None:
    if not low <= value < 2**63:
        raise PlanSettingError(f"{name}={value}: give a whole number from {low} to 2^63 - 1")


def _write(path: Path, found: SearchResult) -> None:
    plain = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "schedule"}
    plain["schedule"] = json.loads(found.schedule.to_json(found.cost_model))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same plan: rename is atomic, a half-written file is never read.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(plain, file)
    os.replace(file.name, path)


def _read(path: Path, problem: Problem) -> SearchResult:
    try:
        plain = json.loads(path.read_text())
        stored = Schedule.from_json(json.dumps(plain.pop("schedule")))
        if stored.problem.digest != problem.digest:
            raise ScheduleError("it is the schedule of another problem")
        found = SearchResult(schedule=Schedule(problem, stored.order).check(), **plain)
        _check_figures(found)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ScheduleError(f"{path} is no valid plan ({error}): delete it") from None
    return found


def _check_figures(found: SearchResult) -> None:
    """Reckon a stored plan's figures again. Raises ScheduleError naming the first that is wrong."""
    problem, schedule = found.schedule.problem, found.schedule
    cap = None if problem.memory_cap is None else to_quanta(problem.memory_cap)
    bound = BoundFinder(problem).makespan(cap).makespan / TICKS_PER_MS
    makespan = schedule.makespan(found.cost_model)
    right = {
        "makespan": makespan,
        "bound": bound,
        "proven_optimal": makespan == bound,
        "peak_memory": schedule.peak_memory,
    }
    for name, value in right.items():
        if getattr(found, name) != value:
            raise ScheduleError(f"its {name} is {getattr(found, name)!r}, should be {value!r}")
    for name in ("evaluations", "cpu_s"):
        if not isinstance(getattr(found, name), int | float):
            raise ScheduleError(f"its {name} is {getattr(found, name)!r}, should be a number")
