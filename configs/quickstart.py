"""The whole of RLHF in minutes on two CPU cores, offline: the built-in countdown task.

Supervised warm start on imperfect answers, a reward model from preference pairs (Bradley-Terry,
InstructGPT arXiv 2203.02155), then PPO (arXiv 1707.06347) with actor, critic, reference and reward
model. PPO sees the learned reward alone; `gold` (is the answer exactly right?) is only logged.

    python launch/train.py --config configs/quickstart.py --workdir runs/quickstart
"""

from ml_collections import ConfigDict

from fuse_jax.config_read import default_config


def get_config() -> ConfigDict:
    """About 110,000 parameters a model; prompts of 3 tokens, answers of 2 to 36."""
    config = default_config()
    config.model.vocab_size = 72
    config.model.rope_theta = 1000.0

    config.rollout.max_prompt_length = 3
    config.rollout.max_new_tokens = 36
    config.rollout.slots = 64

    config.sft.steps = 220
    config.sft.rows = 24
    config.sft.row_length = 64
    _cosine(config.sft.optimizer, 4e-3)

    config.reward_training.steps = 900
    config.reward_training.rows = 32
    config.reward_training.row_length = 64
    _cosine(config.reward_training.optimizer, 2e-3)

    config.ppo.iterations = 50
    config.ppo.prompts_per_iteration = 128
    config.ppo.critic_warmup = 3
    config.ppo.actor_optimizer.learning_rate = 5e-4
    config.ppo.critic_optimizer.learning_rate = 1e-3
    config.compute.sequence_buckets = "16,40"
    # Few of the 32 samples of a mini-batch are long: small micro-batches waste few rows on them.
    config.compute.micro_batch_tokens = 256
    config.compute.scoring_tokens = 512
    return config


def _cosine(optimizer: ConfigDict, learning_rate: float) -> None:
    optimizer.learning_rate = learning_rate
    optimizer.schedule = "cosine"
    optimizer.warmup_fraction = 0.1
    optimizer.final_fraction = 0.05
    optimizer.weight_decay = 0.01
