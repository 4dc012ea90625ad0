"""Generation for the training loop: prompts in, their samples out in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fuse_jax.data.records import Prompt
from fuse_jax.models.transformer import Params
from fuse_jax.rollout.batcher import RolloutStats, generate_samples
from fuse_jax.rollout.engine import Engine
from fuse_jax.rollout.warmup import precompile
from fuse_jax.samples import Sample
from fuse_jax.training.context import SAMPLE, Run


class Generator:
    """A slot engine of the run, sampling as configured or greedily."""

    def __init__(self, run: Run, *, greedy: bool = False) -> None:
        rollout = run.config.rollout
        if greedy:
            rollout = replace(rollout, temperature=0.0, top_k=0, top_p=1.0)
        self.engine = Engine(
            run.archs["actor"],
            rollout,
            stop_tokens=tuple(run.task.vocabulary.stop_token_ids),
            valid_vocab=run.task.vocabulary.vocab_size,
            dtype=run.config.compute.dtype,
            mesh=run.mesh,
        )
        self._key = run.key(SAMPLE)

    def __call__(
        self, actor: Params, prompts: Sequence[Prompt], ids: np.ndarray
    ) -> tuple[list[Sample], dict[str, float]]:
        """Responses to `prompts` under sample ids `ids`, in this order, and how it went.

        Each sample's `meta` is its prompt's, with the prompt's text under "prompt".
        """
        stats = RolloutStats()
        samples = generate_samples(
            self.engine,
            actor,
            [prompt.tokens for prompt in prompts],
            seed_key=self._key,
            sample_ids=[int(i) for i in ids],
            meta=[{**prompt.meta, "prompt": prompt.text} for prompt in prompts],
            stats=stats,
        )
        by_id = {sample.sample_id: sample for sample in samples}
        values = {
            "tokens_per_second": stats.tokens_per_second,
            "slot_occupancy": stats.occupancy,
            "decode_steps": float(stats.decode_steps),
        }
        return [by_id[int(i)] for i in ids], values

    def precompile(self, actor: Params) -> int:
        """Compile all of it now; returns how many programs that took."""
        return precompile(self.engine, actor, self._key).count
