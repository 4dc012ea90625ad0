"""The loop of the supervised stages: packed batches in a shuffled order, saved as it goes.

Warm start and reward model differ in their items, packing and step; how a stage is run, logged,
saved and resumed is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from fuse_jax.data import cursor as cursors
from fuse_jax.data.packing import take_packed
from fuse_jax.training.context import Run
from fuse_jax.training.state import TrainState, check_skipped

LOG_EVERY = 10
# A supervised step is short: one save for this many times `checkpoint.every` steps.
STEPS_PER_SAVE = 10


class Stage(NamedTuple):
    """A supervised stage: `pack(items) -> packed`, `step(state, packed) -> (state, metrics)`."""

    name: str
    items: Sequence[Any]
    steps: int
    pack: Callable[[Any], Any]
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


def run_stage(run: Run, stage: Stage, state: TrainState) -> tuple[TrainState, float]:
    """Train to the end of `stage`; returns the state and the seconds it took over all its runs.

    Raises GivenUp when more than `ppo.max_skipped_updates` updates had non-finite gradients.
    """
    checkpoints = run.checkpoints(stage.name)
    cursor = cursors.start(stage.items, run.config.seed)
    done, seconds, too_long = 0, 0.0, 0
    if run.resume and checkpoints.latest() is not None:
        done, state, host = checkpoints.restore(state)
        cursor = cursors.resume(host["cursor"], stage.items, run.config.seed)
        seconds, too_long = host["seconds"], host["too_long"]
        run.log.drop(lambda row: row["stage"] == stage.name and row["step"] > done)
        if done < stage.steps:
            run.say(f"{stage.name}: resumed after step {done}")
    elif run.resume:
        run.log.drop(lambda row: row["stage"] == stage.name)
    started = time.monotonic() - seconds
    every = STEPS_PER_SAVE * run.config.checkpoint.every
    before: Any = ()
    with tqdm(
        total=stage.steps, initial=done, desc=stage.name, unit="step", mininterval=1.0
    ) as bar:
        for number in range(done + 1, stage.steps + 1):
            packed, cursor = take_packed(stage.items, cursor, stage.pack)
            too_long += packed.num_too_long
            state, metrics = stage.step(state, packed)
            # One step ahead of the device and no more: the bar shows what has been done.
            jax.block_until_ready(before)
            before = metrics
            if number % LOG_EVERY == 0 or number == stage.steps:
                check_skipped(state, run.config.ppo.max_skipped_updates)
                values = {name: float(value) for name, value in metrics.items()}
                run.log.metrics(stage.name, number, values)
                shown = [f"{k} {values[k]:.3f}" for k in ("loss", "accuracy") if k in values]
                bar.set_postfix_str(" ".join(shown), refresh=False)
            if number % every == 0 or number == stage.steps:
                seconds = time.monotonic() - started
                host = {"cursor": cursor.to_dict(), "seconds": seconds, "too_long": too_long}
                checkpoints.save(number, state, host)
            bar.update()
    if too_long:
        run.say(f"{stage.name}: {too_long} items longer than a row were passed over")
    checkpoints.close()
    return state, seconds
