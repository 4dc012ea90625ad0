"""PPO with a rule instead of a reward model: is the last number of the answer the right one?

GSM8K (Cobbe et al., arXiv 2110.14168; MIT, github.com/openai/grade-school-math) through the model's
chat template. The critic starts from the actor's trunk, its scalar head at 0.

    python launch/fetch_smollm2.py models/smollm2-135m-instruct
    python launch/train.py --config configs/gsm8k.py --workdir runs/gsm8k \
        --config.actor.path=models/smollm2-135m-instruct \
        --config.data.prompts=gsm8k/train.jsonl --config.data.eval_prompts=gsm8k/test.jsonl

Any llama or qwen2 directory with a chat template does for `actor.path`. As it stands this is a
check of the whole path: 300 CPU-seconds (two EPYC cores, float32), 7.3 GiB, 4 GB on disk. The
135M model gets none of the 8 questions right, before and after, and 7 of 8 answers need more than
128 tokens; for a training take a larger model and raise `rollout.max_new_tokens`,
`compute.sequence_buckets`, `ppo.iterations`, `ppo.prompts_per_iteration`, `evaluation.prompts`.
"""

from ml_collections import ConfigDict

from fuse_jax.config_read import default_config


def get_config() -> ConfigDict:
    """Two iterations of 8 prompts x 128 new tokens: the whole path, not a training."""
    config = default_config()
    config.stages = "ppo"
    config.data.task = "files"
    config.reward.source = "function"
    config.reward.function = "fuse_jax.data.gsm8k:reward"
    config.reward.normalise = "none"  # 0 or 1 already
    config.reward.clip = 0.0
    config.reward.missing_eos_penalty = 0.0  # a cut answer's last number is no answer
    config.critic.init = "actor"

    config.rollout.max_prompt_length = 128
    config.rollout.max_new_tokens = 128
    config.rollout.temperature = 0.7
    config.rollout.slots = 8
    config.rollout.prefill_rows = 8
    config.rollout.prompt_buckets = "128"
    config.compute.sequence_buckets = "192,256"
    config.compute.micro_batch_tokens = 256  # a row: activations are most of the memory
    config.compute.scoring_tokens = 1024
    config.compute.log_prob_chunk = 16  # 49,152 logits a position: few positions at a time

    config.ppo.iterations = 2
    config.ppo.prompts_per_iteration = 8
    config.ppo.minibatches = 2
    config.ppo.kl.coef = 0.01
    config.ppo.actor_optimizer.learning_rate = 1e-6
    config.ppo.critic_optimizer.learning_rate = 1e-5

    config.evaluation.prompts = 8
    config.checkpoint.keep = 1
    return config
