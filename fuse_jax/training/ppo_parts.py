"""The parts a PPO iteration is made of, built once: engines, scorers, rewards, update steps.

Frozen models (reference, reward model) live here; what changes lives in `PPOState`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuse_jax.buckets import Bucket, make_buckets
from fuse_jax.data.records import Prompt
from fuse_jax.fusion.intra_stage.executor import pipeline_mesh
from fuse_jax.models.transformer import Params
from fuse_jax.placement.host import to_host
from fuse_jax.placement.mesh import pipeline_shape, row_shards
from fuse_jax.placement.sharding import parameter_specs
from fuse_jax.rl.moments import Moments, init_moments, update_moments
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import ROLES, Column, Model, PassOptions, Role, Scored
from fuse_jax.scoring.reward_function import RewardFunction, RewardResult
from fuse_jax.scoring.sample_rewards import TextRewards, model_results, score_samples
from fuse_jax.scoring.scorer import Scorer
from fuse_jax.training import models
from fuse_jax.training.config_check import longest_sequence, sequence_lengths
from fuse_jax.training.context import Run
from fuse_jax.training.experience import ScoredBatch, lay_out, ragged
from fuse_jax.training.fused_rollout import FusedRollout
from fuse_jax.training.generation import Generator
from fuse_jax.training.gradients import BOTH, HyperParameters
from fuse_jax.training.minibatch import Experience, Minibatch, cut_minibatch, training_buckets
from fuse_jax.training.optimizers import planned_updates
from fuse_jax.training.pipeline_check import transports
from fuse_jax.training.pipeline_shared import Pipelines
from fuse_jax.training.pipeline_step import PipelineStep
from fuse_jax.training.ppo_step import Step, create_ppo_state, make_step
from fuse_jax.training.state import TrainState

DRIFT_WARNING = 1e-3  # |log-prob of the sampler - of the trainer| above which iteration 0 warns
REFERENCE_SAMPLES = 1024  # responses that fix the reward scale of reward.normalise='reference'
EVAL_IDS = 1 << 30  # sample ids of evaluation start here, apart from those of training
REFERENCE_IDS = 1 << 29  # and those that fix the reward scale here


@dataclass
class PPOParts:
    """See the module's docstring. Use it in a `with` statement: it may own worker processes."""

    run: Run
    generator: Generator
    greedy: Generator
    scorer: Scorer
    rewarder: Scorer | None
    checker: Scorer
    text_rewards: TextRewards | None
    reference: Params
    reward_model: Params | None
    buckets: tuple[Bucket, ...]
    step: Step | PipelineStep
    critic_step: Step | PipelineStep
    fused: FusedRollout | None = None  # then the frozen models wait on the host

    def __enter__(self) -> PPOParts:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.text_rewards is not None:
            self.run.say(self.text_rewards.function.summary())
            self.text_rewards.function.close()

    # ------------------------------------------------------------------ generation

    def generate(
        self, actor: Params, prompts: Sequence[Prompt], ids: np.ndarray
    ) -> tuple[list[Sample], dict[str, float]]:
        """Samples of training prompts, in their order, and how generation went."""
        return self.generator(actor, prompts, ids)

    def generate_eval(
        self, actor: Params, prompts: Sequence[Prompt], ids: np.ndarray, *, greedy: bool
    ) -> list[Sample]:
        """Samples of held-out prompts; ids far from those of training."""
        engine = self.greedy if greedy else self.generator
        return engine(actor, prompts, ids + EVAL_IDS)[0]

    # ------------------------------------------------------------------ scoring

    def models(self, train: TrainState | None) -> dict[Role, Model]:
        """What scoring reads, where it is kept: the frozen models, and those of `train`."""
        archs = self.run.archs
        found: dict[Role, Model] = {"reference": Model(archs["reference"], self.reference)}
        if self.reward_model is not None:
            found["reward_model"] = Model(archs["reward_model"], self.reward_model)
        if train is not None:
            found["actor"] = Model(archs["actor"], train.params["actor"])
            found["critic"] = Model(archs["critic"], train.params["critic"])
        return found

    def models_for(self, scorer: Scorer, train: TrainState | None) -> dict[Role, Model]:
        """Those that `scorer` reads, on the run's mesh."""
        found, placed = self.models(train), {}
        for column in scorer.columns:
            for role in ROLES[column]:
                arch, params = found[role]
                specs = parameter_specs(arch, params, self.run.mesh)
                placed[role] = Model(arch, jax.device_put(params, specs))
        return placed

    def scorers(self) -> list[Scorer]:
        """All scorers of the run."""
        return [one for one in (self.scorer, self.rewarder, self.checker) if one is not None]

    def score(
        self, train: TrainState, prompts: Sequence[Prompt], samples: list[Sample], iteration: int
    ) -> tuple[ScoredBatch, dict[str, float]]:
        """Every column of `samples`; in iteration 0 the trainer's log-probs are checked too."""
        found = self.models_for(self.scorer, train)
        scored, rewards = score_samples(samples, self.scorer, found, self.text_rewards)
        return self._checked(train, samples, self._batch(samples, scored, rewards), iteration)

    def roll_out_fused(
        self, train: TrainState, prompts: Sequence[Prompt], ids: np.ndarray, iteration: int
    ) -> tuple[list[Sample], ScoredBatch, dict[str, float]]:
        """`generate` and `score` at the same time, by the instances of `fused`."""
        assert self.fused is not None
        outcome, values = self.fused(self.models(train), prompts, ids, self.text_rewards)
        rewards = model_results(outcome.scored) if outcome.rewards is None else outcome.rewards
        batch = self._batch(outcome.samples, outcome.scored, rewards)
        batch, checks = self._checked(train, outcome.samples, batch, iteration)
        return outcome.samples, batch, values | checks

    def _checked(
        self, train: TrainState, samples: list[Sample], batch: ScoredBatch, iteration: int
    ) -> tuple[ScoredBatch, dict[str, float]]:
        """`batch`, with the trainer's log-probs if asked for, and how far they are off."""
        config = self.run.config
        recompute = config.ppo.recompute_log_probs
        if not recompute and iteration > 0:
            return batch, {}
        own = self.checker.score(samples, self.models_for(self.checker, train))
        width = config.rollout.max_new_tokens
        log_probs = ragged([one.log_probs for one in own if one.log_probs is not None], width)
        inside = np.arange(width) < batch.response_lengths[:, None]
        values = self._drift(np.abs(log_probs - batch.log_probs)[inside], iteration)
        return (batch._replace(log_probs=log_probs) if recompute else batch), values

    def _drift(self, drift: np.ndarray, iteration: int) -> dict[str, float]:
        values = {
            "log_prob_drift_max": float(drift.max(initial=0.0)),
            "log_prob_drift_p999": float(np.percentile(drift, 99.9)) if drift.size else 0.0,
        }
        if iteration == 0:
            largest = values["log_prob_drift_max"]
            self.run.say(
                f"sampler against trainer, |Δlog_prob|: max {largest:.2e}, "
                f"99.9th percentile {values['log_prob_drift_p999']:.2e}"
            )
            rollout = self.run.config.rollout
            cut = rollout.top_k > 0 or rollout.top_p < 1
            if largest > DRIFT_WARNING and not cut:
                self.run.say(
                    f"WARNING: the sampler's log-probs differ from the trainer's by more than "
                    f"{DRIFT_WARNING:g}: set ppo.recompute_log_probs=True, or compute.dtype=float32"
                )
        return values

    def _batch(
        self, samples: list[Sample], scored: list[Scored], rewards: list[RewardResult]
    ) -> ScoredBatch:
        config = self.run.config
        width = config.rollout.max_new_tokens
        pad = self.run.task.vocabulary.pad_token_id
        tokens, prompts, responses = lay_out(samples, longest_sequence(config), pad)
        valid = np.array([reward.valid for reward in rewards])
        scores = np.array([reward.score for reward in rewards], np.float32)

        def column(name: str) -> np.ndarray:
            return ragged([getattr(one, name) for one in scored], width)

        return ScoredBatch(
            tokens=tokens,
            prompt_lengths=prompts,
            response_lengths=responses,
            truncated=np.array([sample.truncated for sample in samples]),
            log_probs=ragged([sample.log_probs for sample in samples], width),
            ref_log_probs=column("ref_log_probs"),
            values=column("values"),
            last_values=np.array([one.last_value for one in scored], np.float32),
            scores=np.where(valid, scores, 0.0).astype(np.float32),
            valid=valid,
            kl=column("full_kl") if config.ppo.kl.estimator == "full" else None,
        )

    def scores(self, samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
        """Raw scores `[N]` of the reward source, and which of them are valid."""
        models = {} if self.rewarder is None else self.models_for(self.rewarder, None)
        return raw_scores(samples, self.text_rewards, self.rewarder, models)

    # ------------------------------------------------------------------ update

    def wait(self) -> None:
        """Until no update is in flight. Raises the error of one that failed."""
        self.step.wait()
        self.critic_step.wait()

    def cut(self, experience: Experience, indices: np.ndarray, kl_coef: float) -> Minibatch:
        """The samples `indices` as the fixed-shape mini-batch of the update."""
        return cut_minibatch(
            experience,
            indices,
            self.buckets,
            aggregation=self.run.config.ppo.aggregation,
            shards=update_shards(self.run),
            kl_coef=kl_coef,
        )


def build_parts(
    run: Run,
    actor: Params,
    reward_model: Params | None,
    reward_function: Callable[[str, str, dict], float] | None = None,
) -> tuple[PPOParts, TrainState, Moments]:
    """Build everything PPO needs; also its fresh state, and the moments that scale its rewards.

    Where a checkpoint will replace state and moments, the moments are not measured again.
    """
    config = run.config
    hp = hyper_parameters(run)
    uses_model = config.reward.source == "model"
    columns: list[Column] = ["ref_log_probs", "values"]
    if uses_model:
        columns.append("scores")
    if config.ppo.kl.estimator == "full":
        columns.append("full_kl")
    scorer = partial(make_scorer, run)
    step, critic_step = make_steps(run, hp)
    generator = Generator(run)
    inter = config.fusion.inter_stage
    fused = None
    if inter.instances > 1 or inter.policy != "serial":
        fused = FusedRollout(run, columns)

    def frozen(params: Params) -> Params:
        kept = models.frozen(run, params)
        return kept if fused is None else to_host(kept)

    parts = PPOParts(
        run=run,
        generator=generator,
        greedy=Generator(run, greedy=True),
        scorer=scorer(columns),
        rewarder=scorer(["scores"]) if uses_model else None,
        checker=scorer(["log_probs"]),
        text_rewards=None if uses_model else make_text_rewards(run, reward_function),
        reference=frozen(models.initial_reference(run, actor)),
        reward_model=None if reward_model is None else frozen(reward_model),
        buckets=training_buckets(
            sequence_lengths(config),
            config.compute.micro_batch_tokens,
            config.ppo.prompts_per_iteration // config.ppo.minibatches,
            update_shards(run),
        ),
        step=step,
        critic_step=critic_step,
        fused=fused,
    )
    moments = init_moments()
    if config.reward.normalise == "reference" and not run.resumes("ppo"):
        moments = reference_moments(parts, actor)
    mean, deviation = 0.0, 1.0
    if uses_model:  # the moments are of its scores, and so in units of its head
        mean = float(moments.mean)
        deviation = float(np.sqrt(moments.m2 / max(1.0, float(moments.count)))) or 1.0
    critic = models.initial_critic(run, actor, reward_model, mean, deviation)
    state = create_ppo_state({"actor": actor, "critic": critic}, hp, run.mesh)
    return parts, state, moments


def hyper_parameters(run: Run) -> HyperParameters:
    """What the update is compiled for."""
    planned = planned_updates(run.config.ppo)
    return HyperParameters(
        actor=run.archs["actor"],
        critic=run.archs["critic"],
        ppo=run.config.ppo,
        compute=run.config.compute,
        temperature=run.config.rollout.temperature,
        valid_vocab=run.task.vocabulary.vocab_size,
        updates=(planned["actor"], planned["critic"]),
    )


def make_steps(run: Run, hp: HyperParameters) -> tuple[Step | PipelineStep, Step | PipelineStep]:
    """The update of both models, and of the critic alone: serial, or over `mesh.pipe`."""
    config = run.config
    if config.mesh.pipe == 1:
        return make_step(run.mesh, hp), make_step(run.mesh, hp, train=("critic",))
    pipe, data, tensor = pipeline_shape(run.mesh, config.mesh.pipe)
    pipelines = Pipelines(
        config.fusion.intra_stage,
        hp,
        pipeline_mesh(pipe, data, tensor, run.mesh.devices.flat),
        run.mesh,
        transports(pipe, tensor),
        say=run.say,
        workdir=run.workdir,
    )
    return PipelineStep(pipelines, BOTH), PipelineStep(pipelines, ("critic",))


def update_shards(run: Run) -> int:
    """Over how many shards the rows of an update are cut."""
    return row_shards(run.mesh) // run.config.mesh.pipe


def reference_moments(parts: PPOParts, actor: Params) -> Moments:
    """Mean and spread of the scores of the initial actor's responses to training prompts."""
    prompts = parts.run.task.prompts
    count = min(REFERENCE_SAMPLES, max(len(prompts), 64))
    asked = [prompts[index % len(prompts)] for index in range(count)]
    ids = np.arange(count, dtype=np.int32) + REFERENCE_IDS
    samples, _ = parts.generate(actor, asked, ids)
    scores, valid = parts.scores(samples)
    return update_moments(init_moments(), jnp.asarray(scores), jnp.asarray(valid))


def raw_scores(
    samples: list[Sample],
    text_rewards: TextRewards | None,
    rewarder: Scorer | None,
    models: Mapping[Role, Model],
) -> tuple[np.ndarray, np.ndarray]:
    """Scores `[N]` of `text_rewards`, else of the reward model, and which of them are valid."""
    if text_rewards is not None:
        text_rewards.submit(samples)
        results = text_rewards.collect(samples)
    else:
        assert rewarder is not None
        results = model_results(rewarder.score(samples, models))
    scores = np.array([result.score for result in results], np.float32)
    return scores, np.array([result.valid for result in results])


def make_scorer(run: Run, columns: Sequence[Column]) -> Scorer:
    """A scorer of `columns` in the run's buckets."""
    config = run.config
    shards = row_shards(run.mesh)
    return Scorer(
        run.mesh,
        make_buckets(sequence_lengths(config), config.compute.scoring_tokens, shards),
        columns,
        max_response=config.rollout.max_new_tokens,
        pad_token=run.task.vocabulary.pad_token_id,
        options=PassOptions(
            temperature=config.rollout.temperature,
            valid_vocab=run.task.vocabulary.vocab_size,
            chunk=config.compute.log_prob_chunk,
            dtype=run.dtype,
        ),
    )


def make_text_rewards(
    run: Run, reward_function: Callable[[str, str, dict], float] | None = None
) -> TextRewards:
    """The run's reward function (or the one given) on the text of samples; close its `function`."""
    reward = run.config.reward
    function: Any = reward_function or reward.function
    return TextRewards(
        RewardFunction(function, workers=reward.workers, timeout=reward.timeout),
        run.task.vocabulary.decode,
        prompt_text=lambda sample: sample.meta["prompt"],
    )
