"""The sample table: what the actor said, and what it was worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fuse_jax.samples import Sample
from fuse_jax.training.context import Run


def log_samples(
    run: Run, stage: str, step: int, samples: Sequence[Sample], scores: np.ndarray
) -> None:
    """A line each in samples.jsonl: stage, step, prompt, response, score, length, truncated."""
    decode, gold = run.task.vocabulary.decode, run.task.gold
    rows = []
    for sample, score in zip(samples, scores, strict=False):
        row = {
            "stage": stage,
            "step": step,
            "prompt": sample.meta["prompt"],
            "response": decode(sample.response_tokens),
            "score": round(float(score), 4) if np.isfinite(score) else None,
            "length": len(sample.response_tokens),
            "truncated": bool(sample.truncated),
        }
        if gold is not None:
            row["gold"] = bool(gold(sample.prompt_tokens.tolist(), sample.response_tokens.tolist()))
        rows.append(row)
    run.log.samples(rows)
