"""Toy experience, and PPO's losses over it one sample at a time: no padding, batch, mask or cut."""

from functools import partial

import drawn
import jax
import jax.numpy as jnp
import numpy as np

from fuse_jax.config import ComputeConfig, KLConfig, OptimizerConfig, PPOConfig
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.transformer import forward
from fuse_jax.training.gradients import HyperParameters
from fuse_jax.training.minibatch import Experience

# One layer each: these tests are about losses and cuts, and compile time goes with depth.
ACTOR = Architecture("llama", 37, 16, 32, 1, 2, 1, 8)
CRITIC = Architecture("qwen2", 37, 16, 24, 1, 2, 2, 8, attention_bias=True)
LONGEST, RESPONSE = 16, 12


def hyper_parameters(*, compute=None, temperature=0.7, valid_vocab=35, lr=1e-3, **ppo):
    """Settings with every term of the losses switched on."""
    optimizer = OptimizerConfig(learning_rate=lr)
    wanted = {
        "entropy_coef": 0.05,
        "dual_clip": 2.0,
        "clip_eps_high": 0.3,
        "value_clip_eps": 0.2,
        "kl": KLConfig(placement="loss", estimator="k2"),
        "actor_optimizer": optimizer,
        "critic_optimizer": optimizer,
    } | ppo
    return HyperParameters(
        ACTOR,
        CRITIC,
        PPOConfig(**wanted),
        compute or ComputeConfig(),
        temperature=temperature,
        valid_vocab=valid_vocab,
        updates=(10, 10),
    )


def toy_params(seed=0):
    """Actor and critic; the critic's head is not zero, so its trunk has a gradient."""
    params = {
        "actor": drawn.parameters(ACTOR, 2 * seed),
        "critic": drawn.parameters(CRITIC, 2 * seed + 1, "scalar"),
    }
    kernel = 0.3 * np.random.default_rng(seed).standard_normal((CRITIC.hidden_size, 1))
    params["critic"]["head"]["kernel"] = jnp.asarray(kernel, jnp.float32)
    return params


def toy_experience(samples=8, seed=0, lengths=((1, 3), (4, 4), (4, 12), (3, 7))):
    """`samples` samples with (prompt, response) lengths in turn from `lengths`."""
    rng = np.random.default_rng(seed)
    prompts, responses = np.array([lengths[i % len(lengths)] for i in range(samples)], np.int32).T
    mask = (np.arange(RESPONSE) < responses[:, None]).astype(np.float32)

    def noise(scale, mean=0.0):
        drawn = mean + scale * rng.normal(size=(samples, RESPONSE))
        return np.where(mask > 0, drawn, 0.0).astype(np.float32)

    return Experience(
        tokens=rng.integers(1, 35, (samples, LONGEST)).astype(np.int32),
        prompt_lengths=prompts.copy(),
        response_lengths=responses.copy(),
        response_mask=mask,
        log_probs=noise(0.5, -3.5),
        ref_log_probs=noise(0.5, -3.5),
        values=noise(0.3),
        advantages=noise(1.0),
        returns=noise(0.5),
        valid=np.ones(samples, bool),
    )


@partial(jax.jit, static_argnames=("prompt", "response", "temperature", "valid_vocab"))
def log_probs_and_entropy(params, tokens, prompt, response, *, temperature, valid_vocab):
    """Of each response token of one unpadded sequence, by the definition."""
    hidden = forward(ACTOR, params, tokens[None, : prompt + response])[0]
    logits = (hidden @ params["head"]["kernel"])[:, :valid_vocab] / temperature
    log_p = jax.nn.log_softmax(logits)[prompt - 1 : prompt + response - 1]
    chosen = tokens[prompt : prompt + response]
    return log_p[jnp.arange(response), chosen], -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


@partial(jax.jit, static_argnames=("hp", "prompt"))
def sample_terms(params, tokens, prompt, recorded, kl_coef, hp):
    """Sums over one sample's tokens: ((actor's, critic's), gradient of both together).

    tokens `[prompt + R]`; recorded: old and reference log-probs, advantages, values, returns `[R]`.
    """
    old_log_probs, ref_log_probs, a, old, wanted = recorded
    ppo, response = hp.ppo, len(tokens) - prompt

    def terms(params):
        new, entropy = log_probs_and_entropy(
            params["actor"],
            tokens,
            prompt,
            response,
            temperature=hp.temperature,
            valid_vocab=hp.valid_vocab,
        )
        ratio = jnp.exp(new - old_log_probs)
        clipped = jnp.clip(ratio, 1 - ppo.clip_eps, 1 + ppo.clip_eps_high)
        objective = jnp.minimum(ratio * a, clipped * a)
        objective = jnp.where(a < 0, jnp.maximum(objective, ppo.dual_clip * a), objective)
        kl = 0.5 * (new - ref_log_probs) ** 2
        actor = jnp.sum(-objective - ppo.entropy_coef * entropy + kl_coef * kl)

        hidden, head = forward(CRITIC, params["critic"], tokens[None])[0], params["critic"]["head"]
        value = (hidden @ head["kernel"])[prompt - 1 : -1, 0] + head["bias"][0]
        moved = old + jnp.clip(value - old, -ppo.value_clip_eps, ppo.value_clip_eps)
        critic = 0.5 * jnp.sum(jnp.maximum((value - wanted) ** 2, (moved - wanted) ** 2))
        return actor + critic, (actor, critic)

    gradient, sums = jax.grad(terms, has_aux=True)(params)
    return sums, gradient


def losses(params, experience, hp, aggregation, kl_coef):
    """((actor's loss, critic's loss), gradient) over all valid samples."""
    e = experience
    used = [i for i in range(len(e.valid)) if e.valid[i] and e.response_lengths[i]]
    tokens = sum(int(e.response_lengths[i]) for i in used)
    total = None
    for i in used:
        p, r = int(e.prompt_lengths[i]), int(e.response_lengths[i])
        weight = 1 / tokens if aggregation == "token_mean" else 1 / (r * len(used))
        fields = (e.log_probs, e.ref_log_probs, e.advantages, e.values, e.returns)
        recorded = tuple(x[i, :r] for x in fields)
        part = sample_terms(params, jnp.asarray(e.tokens[i, : p + r]), p, recorded, kl_coef, hp)
        part = jax.tree.map(lambda x, w=weight: w * np.asarray(x, np.float64), part)
        total = part if total is None else jax.tree.map(np.add, total, part)
    return total
