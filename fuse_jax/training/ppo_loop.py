"""PPO, iteration by iteration: roll out, score, update, evaluate, save.

The same seed gives the same samples, experience and updates whatever runs them: the serial path,
against which every fused path is held, or generation, scoring and updates fused.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from tqdm import tqdm

from fuse_jax.data import cursor as cursors
from fuse_jax.data.order import permutation, sample_ids
from fuse_jax.models.transformer import Params
from fuse_jax.rl.kl import should_stop_early
from fuse_jax.rl.moments import Moments
from fuse_jax.training.checkpoint import Checkpoints
from fuse_jax.training.context import Run
from fuse_jax.training.evaluate import evaluate
from fuse_jax.training.late_compilations import compilations
from fuse_jax.training.minibatch import Experience
from fuse_jax.training.ppo_parts import PPOParts
from fuse_jax.training.ppo_state import (
    ORDER_SEED,
    PPOState,
    Progress,
    move_kl_coef,
    shape_experience,
)
from fuse_jax.training.sample_table import log_samples
from fuse_jax.training.state import GivenUp, TrainState, check_skipped
from fuse_jax.training.warm_up import precompile, shapes

LATE_SHOWN = 400  # characters of a program's name and shapes
EVALUATIONS = ("eval", "greedy_eval")


def train_ppo(run: Run, parts: PPOParts, train: TrainState, moments: Moments) -> PPOState:
    """Run (or go on with) PPO to its last iteration, or until the KL blows up.

    Raises GivenUp when more than `ppo.max_skipped_updates` updates had non-finite gradients, or no
    sample of an iteration has a score.
    """
    config = run.config.ppo
    state = PPOState(
        train=train,
        moments=moments,
        kl_coef=np.float32(config.kl.coef),
        cursor=cursors.start(run.task.prompts, run.config.seed),
        progress=Progress(),
    )
    for line in shapes(parts):
        run.say(f"shape: {line}")
    if run.config.compute.precompile:
        precompile(run, parts, state)
    checkpoints, best = run.checkpoints("ppo"), run.checkpoints("best", keep=1)
    if run.resume and checkpoints.latest() is not None:
        _restore(run, state, checkpoints, best)
    else:
        run.log.drop(lambda row: row["stage"] in ("ppo", *EVALUATIONS))
        best.forget_after(-1)
        _evaluate(run, parts, state, best)
        best.wait()
        checkpoints.save(0, state.arrays(), state.host())
    with tqdm(
        total=config.iterations, initial=state.progress.iteration, desc="ppo", mininterval=1.0
    ) as bar:
        while state.progress.iteration < config.iterations and not state.progress.stopped:
            with compilations() as compiled:
                values = iterate(run, parts, state)
            _show_late(run, state, compiled)
            done = state.progress.iteration
            last = done == config.iterations or bool(state.progress.stopped)
            if last or (run.config.evaluation.every and done % run.config.evaluation.every == 0):
                _evaluate(run, parts, state, best)
            if last or done % run.config.checkpoint.every == 0:
                best.wait()  # a save that names the best must not be there before it
                checkpoints.save(done, state.arrays(), state.host())
            shown = ("score", "gold", "kl", "length_mean")
            bar.set_postfix_str(" ".join(f"{k} {values[k]:.2f}" for k in shown if k in values))
            bar.update()
    checkpoints.close()
    best.close()
    return state


def _show_late(run: Run, state: PPOState, compiled: list[str]) -> None:
    """Name what was compiled in an iteration that should have found everything ready."""
    last = state.progress.iteration - 1
    if last > 0 or run.config.compute.precompile:
        for program in compiled:
            run.say(f"ppo: iteration {last} had to compile {program[:LATE_SHOWN]}")


def _restore(run: Run, state: PPOState, checkpoints: Checkpoints, best: Checkpoints) -> None:
    done, arrays, host = checkpoints.restore(state.arrays())
    state.train = arrays["train"]
    state.moments = Moments(**arrays["moments"])
    state.kl_coef = np.float32(arrays["kl_coef"])
    state.cursor = cursors.resume(host["cursor"], run.task.prompts, run.config.seed)
    state.progress = Progress(**host["progress"])
    best.forget_after(done)
    if best.latest() != state.progress.best_iteration:
        # A newer best had replaced it: on this machine's replay the next best is found again.
        state.progress.best_score = None
    run.log.drop(lambda row: row["stage"] == "ppo" and row["step"] >= done)
    run.log.drop(lambda row: row["stage"] in EVALUATIONS and row["step"] > done)
    run.say(f"ppo: resumed after iteration {done}")


def iterate(run: Run, parts: PPOParts, state: PPOState) -> dict[str, float]:
    """One iteration; `state` moves on, and its metrics are logged and returned."""
    config, progress = run.config.ppo, state.progress
    iteration = progress.iteration
    clock = time.monotonic()
    started = clock

    indices, state.cursor = cursors.take(state.cursor, config.prompts_per_iteration)
    prompts = [run.task.prompts[index] for index in indices]
    ids = sample_ids(iteration, len(prompts))
    if parts.fused is not None:
        samples, batch, rollout_values = parts.roll_out_fused(state.train, prompts, ids, iteration)
        generation = clock + rollout_values["generation_seconds"]
        progress.spend("rollout", time.monotonic() - (generation - clock))
        clock = progress.spend("scoring", generation)  # what of it generation did not hide
        checks = {}
    else:
        samples, rollout_values = parts.generate(state.train.params["actor"], prompts, ids)
        clock = progress.spend("rollout", clock)
        batch, checks = parts.score(state.train, prompts, samples, iteration)
        clock = progress.spend("scoring", clock)

    experience, values = shape_experience(run, state, batch)
    updates = update(run, parts, state, experience)
    move_kl_coef(run, state, values["kl"], int(batch.valid.sum()))
    progress.spend("update", clock)

    generated = int(batch.response_lengths.sum())
    progress.generated_tokens += generated
    progress.excluded += int((~batch.valid).sum())
    progress.iteration += 1
    values |= checks | updates | rollout_values
    values["seconds"] = time.monotonic() - started
    if run.task.gold is not None:
        rows = zip(prompts, samples)
        values["gold"] = float(
            np.mean([run.task.gold(p.tokens.tolist(), s.response_tokens.tolist()) for p, s in rows])
        )
    run.log.metrics("ppo", iteration, values)
    shown = run.config.evaluation.samples_shown
    log_samples(run, "ppo", iteration, samples[:shown], batch.scores)
    _watch(run, state, values)
    return values


def update(run: Run, parts: PPOParts, state: PPOState, experience: Experience) -> dict[str, float]:
    """All epochs and mini-batches of one iteration; mean metrics (maxima of `..._max`)."""
    config, iteration = run.config.ppo, state.progress.iteration
    count = len(experience.valid)
    warming = iteration < config.critic_warmup
    stopped, empty = False, 0
    collected: list[dict[str, Any]] = []
    for epoch in range(config.epochs):
        order = permutation(count, run.config.seed, ORDER_SEED, iteration, epoch)
        for indices in order.reshape(config.minibatches, -1):
            if not experience.valid[indices].any():
                # Nothing to learn from, and Adam's momentum would still move the weights.
                empty += 1
                continue
            minibatch = parts.cut(experience, indices, float(state.kl_coef))
            step = parts.critic_step if warming or stopped else parts.step
            state.train, metrics = step(state.train, minibatch)
            collected.append(metrics)
            if config.target_kl is not None and "approx_kl" in metrics:
                # Reading the metric waits for the device: only where an early stop is asked for.
                parts.wait()
                stopped = stopped or bool(should_stop_early(metrics["approx_kl"], config.target_kl))
    parts.wait()
    state.progress.early_stops += int(stopped)
    return {
        **_summary(collected),
        "actor_stopped_early": float(stopped),
        "minibatches_empty": float(empty),
    }


def _summary(collected: list[dict[str, Any]]) -> dict[str, float]:
    names = {name for metrics in collected for name in metrics}
    summary = {}
    for name in sorted(names):
        values = [float(metrics[name]) for metrics in collected if name in metrics]
        if name.endswith("_skipped"):
            summary[name] = float(sum(values))
        else:
            summary[name] = max(values) if name.endswith("_max") else float(np.mean(values))
    return summary


def _watch(run: Run, state: PPOState, values: dict[str, float]) -> None:
    """Stop on a KL blow-up; give up where gradients are not finite, or no sample has a score."""
    config = run.config.ppo
    limit = config.kl.stop_above
    if limit and not values["kl"] <= limit:
        state.progress.stopped = (
            f"KL {values['kl']:.2f} nats a response is above ppo.kl.stop_above={limit:g} in "
            f"iteration {state.progress.iteration - 1}"
        )
        run.say(f"ppo: stopped: {state.progress.stopped}")
    check_skipped(state.train, config.max_skipped_updates)
    if values["excluded"] >= config.prompts_per_iteration:
        raise GivenUp(
            f"iteration {state.progress.iteration - 1}: every sample was excluded, so there is "
            "nothing to learn from: mend the reward (samples.jsonl and the messages above say what "
            "it did), then --resume"
        )


def _evaluate(run: Run, parts: PPOParts, state: PPOState, best: Checkpoints) -> None:
    """Held-out evaluation after `iteration` iterations; the best by its score is kept."""
    started = time.monotonic()
    progress = state.progress
    values = evaluate(run, parts, state.train.params["actor"], progress.iteration)
    run.log.metrics("eval", progress.iteration, values)
    score = values["score"]
    if np.isfinite(score) and (progress.best_score is None or score > progress.best_score):
        progress.best_score, progress.best_iteration = float(score), progress.iteration
        actor: Params = state.train.params["actor"]
        best.save(progress.iteration, {"actor": actor}, {"score": float(score)})
    progress.spend("evaluation", started)
