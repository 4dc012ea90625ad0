"""Which shapes a PPO run compiles, and compiling all of them before the first iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fuse_jax.rl.kl import should_stop_early
from fuse_jax.training.config_check import longest_sequence
from fuse_jax.training.context import Run
from fuse_jax.training.experience import ScoredBatch
from fuse_jax.training.ppo_parts import PPOParts
from fuse_jax.training.ppo_state import PPOState, move_kl_coef, shape_experience


def shapes(parts: PPOParts) -> Iterator[str]:
    """A line for every shape: generation, scoring, update."""
    for shape in parts.generator.engine.shapes():
        yield f"{shape.function} {shape.rows} rows x {shape.length}"
    if parts.fused is not None:
        yield from parts.fused.shapes()
    for shape in parts.scorer.shapes():
        yield f"{shape.column} {shape.rows} x {shape.length} tokens, response {shape.response}"
    for bucket in parts.buckets:
        yield f"update {bucket.rows} x {bucket.length} tokens a micro-batch"


def precompile(run: Run, parts: PPOParts, state: PPOState) -> None:
    """Compile every program of an iteration and of the evaluation; `state` is only read."""
    train = state.train
    actor = train.params["actor"]
    parts.generator.precompile(actor)
    parts.greedy.precompile(actor)
    if parts.fused is not None:
        parts.fused.precompile(parts.models(train))
    for scorer in parts.scorers():
        scorer.precompile(parts.models_for(scorer, train))
    experience, _ = shape_experience(run, replace(state), _made_up(run))
    move_kl_coef(run, replace(state), 1.0, 1)
    if run.config.ppo.target_kl is not None:
        should_stop_early(state.moments.mean, run.config.ppo.target_kl)
    size = run.config.ppo.prompts_per_iteration // run.config.ppo.minibatches
    minibatch = parts.cut(experience, np.arange(size), float(state.kl_coef))
    parts.step.precompile(train, minibatch)
    if run.config.ppo.critic_warmup or run.config.ppo.target_kl is not None:
        parts.critic_step.precompile(train, minibatch)


def _made_up(run: Run) -> ScoredBatch:
    """A scored batch of the right shapes: one-token prompts and responses, all zeros."""
    config = run.config
    count, width = config.ppo.prompts_per_iteration, config.rollout.max_new_tokens
    zeros = np.zeros((count, width), np.float32)
    ones = np.ones(count, np.int32)
    return ScoredBatch(
        tokens=np.zeros((count, longest_sequence(config)), np.int32),
        prompt_lengths=ones,
        response_lengths=ones,
        truncated=np.zeros(count, bool),
        log_probs=zeros,
        ref_log_probs=zeros,
        values=zeros,
        last_values=zeros[:, 0],
        scores=zeros[:, 0],
        valid=np.ones(count, bool),
        kl=zeros if config.ppo.kl.estimator == "full" else None,
    )
