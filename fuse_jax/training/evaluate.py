"""Held-out evaluation: sampled and greedy responses to prompts no stage was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fuse_jax.models.transformer import Params
from fuse_jax.samples import Sample
from fuse_jax.training.context import Run
from fuse_jax.training.ppo_parts import PPOParts
from fuse_jax.training.reward_model import auc
from fuse_jax.training.sample_table import log_samples


def evaluate(run: Run, parts: PPOParts, actor: Params, iteration: int) -> dict[str, float]:
    """Scores, gold and lengths of the actor's responses to the evaluation prompts.

    Sampled metrics are named plainly, greedy ones `greedy_...`; `auc` is how well scores tell gold
    responses from others. The same prompts and sample ids every time, so only the actor differs.
    """
    settings = run.config.evaluation
    pool = run.task.eval_prompts[: settings.prompts]
    prompts = [prompt for prompt in pool for _ in range(settings.samples_per_prompt)]
    values: dict[str, float] = {}
    for prefix, asked, greedy in (("", prompts, False), ("greedy_", pool, True)):
        ids = np.arange(len(asked), dtype=np.int32)
        samples = parts.generate_eval(actor, asked, ids, greedy=greedy)
        scores, valid = parts.scores(samples)
        found = summary(samples, scores, valid, run.task.gold)
        values |= {f"{prefix}{name}": value for name, value in found.items()}
        log_samples(run, f"{prefix}eval", iteration, samples, scores)
    values["prompts"] = float(len(pool))
    return values


def summary(
    samples: Sequence[Sample],
    scores: np.ndarray,
    valid: np.ndarray,
    gold: Callable[[Sequence[int], Sequence[int]], bool] | None,
) -> dict[str, float]:
    """Score (of valid samples), exclusions, lengths, truncations; gold and auc where there is one.

    NaN where nothing is left to average.
    """
    lengths = np.array([len(sample.response_tokens) for sample in samples])
    values = {
        "score": float(scores[valid].mean()) if valid.any() else float("nan"),
        "excluded": float((~valid).sum()),
        "length_mean": float(lengths.mean()),
        "length_p99": float(np.percentile(lengths, 99)),
        "truncated": float(sum(sample.truncated for sample in samples)),
    }
    if gold is not None:
        right = np.array(
            [gold(s.prompt_tokens.tolist(), s.response_tokens.tolist()) for s in samples]
        )
        values["gold"] = float(right.mean())
        values["auc"] = float(auc(scores[valid], right[valid]))
    return values
