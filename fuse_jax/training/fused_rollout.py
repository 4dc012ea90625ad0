"""Generation and scoring of an iteration by the inter-stage controller.

The same samples and scores as the serial path of the same instances, sooner. The lengths
it learns and the costs it measures first are not saved: they decide when and where things run.
With `migration=kv` that never shows in what they give. Where samples may be read again (`prefill`,
`auto`) it does: wall times decide which samples are, and their log-probs then differ within 1e-5
(rarely a token, where a draw was that close) between repeats of a run and after resume.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuse_jax.buckets import make_buckets
from fuse_jax.data.records import Prompt
from fuse_jax.fusion.inter_stage.choose import choose, needs_refresh
from fuse_jax.fusion.inter_stage.costs import Costs
from fuse_jax.fusion.inter_stage.instances import (
    Instance,
    cut_mesh,
    geometry_of,
    instance_rollout,
)
from fuse_jax.fusion.inter_stage.job import Job, Outcome
from fuse_jax.fusion.inter_stage.lengths import LengthHistory, PromptLengths
from fuse_jax.fusion.inter_stage.measure import measure_costs, warm_up
from fuse_jax.fusion.inter_stage.plot import plot_timeline
from fuse_jax.fusion.inter_stage.policy import Plan, Way
from fuse_jax.fusion.inter_stage.runtime import run as run_fused
from fuse_jax.fusion.inter_stage.spans import figures
from fuse_jax.placement.mesh import row_shards
from fuse_jax.rollout.batcher import Request
from fuse_jax.rollout.engine import Engine
from fuse_jax.scoring.columns import Column, Model, PassOptions, Role
from fuse_jax.scoring.sample_rewards import TextRewards
from fuse_jax.scoring.scorer import Scorer
from fuse_jax.training.config_check import sequence_lengths
from fuse_jax.training.context import SAMPLE, Run

TIMELINE = "inter_stage"  # files of the work directory: the newest plan's first iteration


@dataclass(frozen=True)
class Forecast:
    """A plan, the lengths it was made from, and whether those of its prompts were predicted."""

    plan: Plan
    history: LengthHistory
    by_prompt: bool


class FusedRollout:
    """The instances of a run, and what has been learnt of their work."""

    def __init__(self, run: Run, columns: Sequence[Column]) -> None:
        settings = run.config.fusion.inter_stage
        self.run, self.settings = run, settings
        self.instances = make_instances(run, columns)
        self.geometry = geometry_of(self.instances)
        self.history = LengthHistory()
        self._key = run.key(SAMPLE)
        self._costs: Costs | None = None
        self._forecast: Forecast | None = None
        self._planning = 0.0  # seconds it took to plan this iteration
        self.prompts = PromptLengths()
        if len(self.instances) == 1 and settings.policy != "serial":
            run.say(
                "inter-stage fusion: one instance has no other devices to overlap with: samples "
                "are handed over, but nothing runs at the same time"
            )
        if "prefill" in self.ways:
            run.say(
                f"inter-stage fusion: with migration={settings.migration} measured times decide "
                "which samples are read again: repeats of this run, and a resumed one, may differ "
                "by 1e-5 in their log-probs; migration=kv keeps every bit"
            )

    @property
    def ways(self) -> tuple[Way, ...]:
        """How live samples may move; () where nothing ever moves."""
        settings = self.settings
        still = settings.policy in ("serial", "stream")
        still = still or (settings.policy == "fixed" and not settings.threshold)
        if still or len(self.instances) == 1:
            return ()
        return ("kv", "prefill") if settings.migration == "auto" else (settings.migration,)

    def shapes(self) -> Iterator[str]:
        """A line for every shape of an instance; all have the same."""
        first, count = self.instances[0], len(self.instances)
        moves = {"migration": "kv" in self.ways, "resume": "prefill" in self.ways}
        for shape in first.engine.shapes(**moves):
            yield f"{count} instances: {shape.function} {shape.rows} rows x {shape.length}"
        for shape in first.scorer.shapes():
            yield f"{count} instances: {shape.column} {shape.rows} x {shape.length} tokens"

    def precompile(self, models: Mapping[Role, Model]) -> int:
        """Compile everything an iteration runs, measure what it costs; returns how many programs.

        `models` are where the run keeps them.
        """
        count = warm_up(self.instances, models, self._key, ways=self.ways)
        self._measure(models)
        return count

    def __call__(
        self,
        models: Mapping[Role, Model],
        prompts: Sequence[Prompt],
        ids: np.ndarray,
        text_rewards: TextRewards | None,
    ) -> tuple[Outcome, dict[str, float]]:
        """Scored responses to `prompts` under sample ids `ids`, in this order, and how it went."""
        rollout = self.run.config.rollout
        requests = [
            Request(
                int(i),
                np.asarray(prompt.tokens, np.int32),
                rollout.max_new_tokens,
                {**prompt.meta, "prompt": prompt.text},
            )
            for i, prompt in zip(ids, prompts, strict=True)
        ]
        costs = self._measure(models)
        asked = [request.prompt_tokens.tobytes() for request in requests]
        predicted = self.prompts.trusted(asked)
        lengths = [len(request.prompt_tokens) for request in requests]
        self._planning = 0.0
        plan, new = self._plan(costs, lengths, predicted)
        known = (self.history, predicted)
        job = Job(requests, models, self._key, plan, costs, *known, text_rewards)
        outcome = run_fused(self.instances, job)
        responses = [len(sample.response_tokens) for sample in outcome.samples]
        self.history = self.history.extend(responses)
        self.prompts.observe(asked, responses)
        if new:
            self._draw(plan, outcome)
        return outcome, self._values(plan, outcome)

    # ------------------------------------------------------------------ what is known

    def _measure(self, models: Mapping[Role, Model]) -> Costs:
        if self._costs is None:
            self._costs = measure_costs(self.instances, models, self._key, ways=self.ways)
        return self._costs

    def _plan(
        self, costs: Costs, prompts: Sequence[int], predicted: Sequence[float]
    ) -> tuple[Plan, bool]:
        """The plan, made anew where lengths have drifted, or are predicted now; whether it was."""
        settings, known = self.settings, self._forecast
        by_prompt = bool(len(predicted))
        if (
            known is not None
            and known.by_prompt == by_prompt
            and not needs_refresh(known.history, self.history)
        ):
            return known.plan, False
        began = time.perf_counter()
        plan = choose(
            settings.policy,
            self.geometry,
            costs,
            prompts,
            self.history,
            self.run.config.rollout.max_new_tokens,
            predicted=predicted,
            ratios=self.prompts.ratios,
            threshold=settings.threshold,
            keep=settings.keep,
            way=settings.migration,
        )
        changed = known is None or plan != known.plan
        self._forecast = Forecast(plan, self.history, by_prompt)
        self._planning = time.perf_counter() - began
        if changed:
            self.run.say(f"inter-stage plan, {plan.policy}: {plan.why}")
        return plan, changed

    # ------------------------------------------------------------------ what is shown

    def _values(self, plan: Plan, outcome: Outcome) -> dict[str, float]:
        found = figures(outcome.timeline.spans, len(self.instances))
        stats, counts = outcome.rollout, outcome.counts
        steps = sum(one.slot_steps for one in stats)
        occupied = sum(one.occupied_slot_steps for one in stats)
        tokens = sum(one.generated_tokens for one in stats)
        values: dict[str, Any] = {
            "tokens_per_second": tokens / max(outcome.generation_ms / 1e3, 1e-9),
            "slot_occupancy": occupied / steps if steps else 0.0,
            "decode_steps": sum(one.decode_steps for one in stats),
            "fusion_threshold": plan.threshold,
            "fusion_keep": plan.keep,
            "fusion_seconds": outcome.total_ms / 1e3,
            "planning_seconds": self._planning,
            "generation_seconds": outcome.generation_ms / 1e3,
            "scoring_hidden": found.scoring_hidden,
            "device_utilisation": found.utilisation,
            "migrated": counts.migrated,
            "rerun": counts.rerun,
            "instances_failed": counts.failed,
        }
        if plan.predicted_ms is not None:
            values["fusion_predicted_seconds"] = plan.predicted_ms / 1e3
        return {name: float(value) for name, value in values.items()}

    def _draw(self, plan: Plan, outcome: Outcome) -> None:
        workdir = self.run.workdir
        outcome.timeline.write(workdir / f"{TIMELINE}_trace.json")
        plot_timeline(
            outcome.timeline.spans,
            workdir / f"{TIMELINE}.png",
            instances=len(self.instances),
            title=f"Generation and scoring, {plan.policy}",
        )


def make_instances(run: Run, columns: Sequence[Column]) -> list[Instance]:
    """The run's mesh cut into instances, each with its share of slots and scoring rows."""
    config = run.config
    count = config.fusion.inter_stage.instances
    rollout = instance_rollout(config.rollout, count)
    vocabulary = run.task.vocabulary
    instances = []
    for index, mesh in enumerate(cut_mesh(run.mesh, count)):
        engine = Engine(
            run.archs["actor"],
            rollout,
            stop_tokens=tuple(vocabulary.stop_token_ids),
            valid_vocab=vocabulary.vocab_size,
            dtype=config.compute.dtype,
            mesh=mesh,
        )
        tokens = config.compute.scoring_tokens // count
        scorer = Scorer(
            mesh,
            make_buckets(sequence_lengths(config), tokens, row_shards(mesh)),
            columns,
            max_response=rollout.max_new_tokens,
            pad_token=vocabulary.pad_token_id,
            options=PassOptions(
                temperature=rollout.temperature,
                valid_vocab=vocabulary.vocab_size,
                chunk=config.compute.log_prob_chunk,
                dtype=run.dtype,
            ),
        )
        instances.append(Instance(index, engine, scorer))
    return instances
