"""Every setting of a run, as frozen dataclasses with defaults that work.

`configs/*.py` and the command line give an `ml_collections.ConfigDict`; `config_read` turns it
into these, and `training.config_check` refuses what cannot run, naming the key and the fix.
Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fuse_jax.models.architecture import Architecture

STAGES = ("sft", "reward_model", "ppo")


@dataclass(frozen=True)
class ModelConfig:
    """Where a model's weights come from: an HF directory, or another model of the run."""

    path: str = ""


@dataclass(frozen=True)
class CriticConfig:
    """The critic starts from `path`, or from the reward model, or from the actor's trunk."""

    path: str = ""
    init: Literal["reward_model", "actor"] = "reward_model"


@dataclass(frozen=True)
class DataConfig:
    """What is read. `countdown` is the built-in task; `files` reads the paths below."""

    task: Literal["countdown", "files"] = "countdown"
    prompts: str = ""
    eval_prompts: str = ""
    preferences: str = ""
    eval_preferences: str = ""
    demonstrations: str = ""
    limit: int = 0  # first n records of each file; 0 = all
    held_out: int = 0  # prompts (pairs) kept from training where no eval_... file is named


@dataclass(frozen=True)
class RolloutConfig:
    """Generation. A finished slot is refilled at once from the prompt queue."""

    slots: int = 64
    max_prompt_length: int = 8
    max_new_tokens: int = 36
    chunk: int = 8  # decode steps per dispatch
    prefill_rows: int = 16  # rows of one prefill
    prompt_buckets: tuple[int, ...] = ()  # () = powers of two up to max_prompt_length
    cache_block: int = 32  # cache positions per attention block
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off


@dataclass(frozen=True)
class ComputeConfig:
    """Numerics and the shapes that training and scoring compile for."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "full", "dots"] = "none"
    sequence_buckets: tuple[int, ...] = ()  # () = automatic, up to prompt + response
    micro_batch_tokens: int = 1024  # rows of a training micro-batch = this // its bucket
    scoring_tokens: int = 2048  # the same for scoring passes, which keep no activations
    log_prob_chunk: int = 0  # positions whose logits exist at once; 0 = all
    precompile: bool = False


@dataclass(frozen=True)
class RewardConfig:
    """Where scores come from and how they are shaped before PPO sees them."""

    source: Literal["model", "function"] = "model"
    function: str = ""  # "package.module:name", called as name(prompt, response, meta) -> float
    workers: int = 2
    timeout: float = 10.0  # seconds a sample may take
    normalise: Literal["none", "reference", "running"] = "reference"
    clip: float = 5.0  # after normalisation; 0 = off
    missing_eos_penalty: float | None = -3.0  # score of a truncated response; None = keep its own
    control: Literal["none", "shuffled"] = "none"  # control run: scores permuted over the batch


@dataclass(frozen=True)
class KLConfig:
    """The pull towards the reference model."""

    coef: float = 0.15
    placement: Literal["reward", "loss"] = "reward"
    estimator: Literal["k1", "abs", "k2", "k3", "full"] = "k1"
    controller: Literal["fixed", "adaptive"] = "fixed"
    target: float = 6.0  # adaptive: nats a sequence
    horizon: int = 10000  # adaptive: samples
    stop_above: float = 20.0  # nats a sequence: stop the run, keep the best; 0 = off


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a schedule and a global-norm clip of its own model."""

    learning_rate: float = 1e-5
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_fraction: float = 0.0  # of the updates of its stage, from 0 up to the learning rate
    final_fraction: float = 0.0  # of the learning rate, at the last step
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0 = off


@dataclass(frozen=True)
class PPOConfig:
    """One iteration: roll out, score, then `epochs` x `minibatches` updates."""

    iterations: int = 50
    prompts_per_iteration: int = 128
    minibatches: int = 4
    epochs: int = 1
    gamma: float = 1.0
    gae_lambda: float = 0.95
    clip_eps: float = 0.2
    clip_eps_high: float | None = None  # clip-higher; None = clip_eps
    dual_clip: float | None = None
    value_clip_eps: float | None = 0.2
    entropy_coef: float = 0.0
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    whiten_advantages: bool = True
    bootstrap_truncated: bool = False
    critic_warmup: int = 0  # first iterations that train the critic alone
    target_kl: float | None = None  # stop the actor's epochs of an iteration above this
    recompute_log_probs: bool = False  # old log-probs from the trainer's forward, not the sampler
    max_skipped_updates: int = 10  # of any stage: stop after this many with non-finite gradients
    kl: KLConfig = field(default_factory=KLConfig)
    actor_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True)
class SFTConfig:
    """Supervised warm start on packed demonstrations."""

    steps: int = 200
    rows: int = 24
    row_length: int = 64
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True)
class RewardTrainingConfig:
    """Bradley-Terry training of the reward model on packed preference pairs."""

    steps: int = 600
    rows: int = 32
    row_length: int = 64
    max_pairs: int = 192  # pairs in one batch, padded
    score_l2: float = 0.01
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True)
class MeshConfig:
    """Devices of the run, cut into data x fsdp x tensor; -1 for `data` takes what is left.

    With pipe > 1 the PPO update sees the `data` axis as pipe x (data / pipe) and trains actor and
    critic in pipelines over `pipe` (see FusionConfig); everything else keeps using it as `data`.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    pipe: int = 1
    cpu_devices: int = 0  # devices to split the host into, on CPU; 0 = as JAX starts


@dataclass(frozen=True)
class IntraStageConfig:
    """How actor and critic are trained in pipelines; read where mesh.pipe > 1.

    Backwards are whole here; schedules and executors know split ones too (input, then weights).
    """

    schedule: Literal["auto", "fused", "serial"] = "auto"  # auto: fused where predicted faster
    transport: Literal["auto", "mailbox", "pair", "ring", "dispatch"] = "auto"
    actor_stages: int = 0  # devices of one pipeline, a divisor of mesh.pipe; 0 = mesh.pipe
    critic_stages: int = 0
    search_evaluations: int = 50_000  # schedules tried in a search
    drift: float = 0.25  # task times this share off those searched with: search again; 0 = never
    # Seconds in which no device begins a task (pair and ring where nothing notes tasks: beyond 3
    # times the predicted step) before the step ends in an error, or with pair and ring the process.
    timeout: float = 120.0


@dataclass(frozen=True)
class InterStageConfig:
    """How generation and scoring overlap; off with one instance and policy serial.

    `instances` cut mesh.data; each has its share of rollout.slots, rollout.prefill_rows and
    compute.scoring_tokens. Samples that move with their caches keep every bit; those that are read
    again have log-probs within 1e-5.
    """

    instances: int = 1
    policy: Literal["serial", "fixed", "knee", "simulated", "stream", "auto"] = "serial"
    # R_t: samples unfinished when the tail moves; policies fixed (0: it stays), knee (0: chosen)
    threshold: int = 0
    keep: int = 0  # m: instances that go on generating then; policy fixed
    # Caches move, or tokens are read again; auto: whatever is measured to be faster. With auto and
    # prefill, wall times show in the last digits: repeats and resumed runs differ by up to 1e-5.
    migration: Literal["auto", "kv", "prefill"] = "kv"


@dataclass(frozen=True)
class FusionConfig:
    """Stage fusion (RLHFuse, arXiv 2409.13221): when and where things run, never what."""

    inter_stage: InterStageConfig = field(default_factory=InterStageConfig)
    intra_stage: IntraStageConfig = field(default_factory=IntraStageConfig)


@dataclass(frozen=True)
class CheckpointConfig:
    """How often everything a resumed run needs is saved, and how many saves are kept."""

    every: int = 10  # PPO iterations, and 10 x as many steps of the supervised stages
    keep: int = 2


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation, sampled and greedy."""

    every: int = 10  # PPO iterations; 0 = only before and after
    prompts: int = 512
    samples_per_prompt: int = 1
    samples_shown: int = 8  # rows of the sample table, each iteration


@dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = 0
    stages: tuple[str, ...] = STAGES
    tokenizer: str = ""  # HF directory; empty = the actor's, or the task's own
    model: Architecture = field(default_factory=Architecture)  # used where no path is given
    actor: ModelConfig = field(default_factory=ModelConfig)
    reference: ModelConfig = field(default_factory=ModelConfig)
    reward_model: ModelConfig = field(default_factory=ModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    reward_training: RewardTrainingConfig = field(default_factory=RewardTrainingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
