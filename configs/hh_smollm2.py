"""RLHF of a real model on real preferences: SmolLM2-135M-Instruct and HH-RLHF, on a CPU.

The reward model starts from the actor's trunk and is trained some steps on preference pairs
(Bradley-Terry, InstructGPT arXiv 2203.02155; data arXiv 2204.05862); then PPO (arXiv 1707.06347)
answers the pairs' prompts. Held-out prompts and pairs are split from the same file. Get the model
with launch/fetch_smollm2.py, the data from github.com/anthropics/hh-rlhf (MIT):

    python launch/train.py --config configs/hh_smollm2.py --workdir runs/hh_smollm2 \
        --config.actor.path=models/smollm2-135m-instruct \
        --config.data.preferences=hh-rlhf/harmless-base/test.jsonl.gz \
        --config.data.prompts=hh-rlhf/harmless-base/test.jsonl.gz

Any llama or qwen2 directory in Hugging Face format does for `actor.path`; it is the trunk of the
reward model too. As it stands this is a check of the whole path, not a training: 470 CPU-seconds
(8 minutes at one EPYC core, float32), 8.2 GiB, 6 GB on disk. After 16 steps the reward model ranks
40 of 64 held-out pairs rightly, little better than chance, and two PPO iterations move no greedy
answer far. For a training raise `reward_training.steps`, `ppo.iterations`,
`ppo.prompts_per_iteration`, `rollout.max_new_tokens` and `compute.sequence_buckets`.
"""

from ml_collections import ConfigDict

from fuse_jax.config_read import default_config


def get_config() -> ConfigDict:
    """Two iterations of 8 prompts x 32 new tokens: the whole path, not a training."""
    config = default_config()
    config.stages = "reward_model,ppo"
    config.data.task = "files"
    config.data.held_out = 64

    config.rollout.max_prompt_length = 96
    config.rollout.max_new_tokens = 32
    config.rollout.temperature = 0.7
    config.rollout.slots = 8
    config.rollout.prefill_rows = 8
    config.rollout.prompt_buckets = "48,96"
    config.compute.sequence_buckets = "80,128"
    config.compute.micro_batch_tokens = 128  # a row: activations are most of the memory
    config.compute.scoring_tokens = 1024
    config.compute.log_prob_chunk = 16  # 49,152 logits a position: few positions at a time

    config.reward_training.steps = 16
    config.reward_training.rows = 8
    config.reward_training.row_length = 128
    config.reward_training.max_pairs = 16
    config.reward_training.optimizer.learning_rate = 5e-5
    config.reward_training.optimizer.warmup_fraction = 0.25
    # Behind a fresh head the trunk's gradients are far below the default 1e-5: it would not move.
    config.reward_training.optimizer.eps = 1e-8

    config.ppo.iterations = 2
    config.ppo.prompts_per_iteration = 8
    config.ppo.minibatches = 2
    config.ppo.actor_optimizer.learning_rate = 1e-6
    config.ppo.critic_optimizer.learning_rate = 1e-5
    # 32 tokens are too few for most answers: a missing stop token says nothing here.
    config.reward.missing_eos_penalty = None
    config.reward.normalise = "running"

    config.evaluation.prompts = 16
    config.checkpoint.keep = 1
    return config
