"""Drawing a token from logits so that the draw belongs to the sample and to nothing else.

A token is drawn by the Gumbel-max trick, argmax(z + g) with g = -log(-log u), which samples
softmax(z) exactly (Maddison et al., arXiv 1411.0030). The noise comes from the key
fold_in(fold_in(seed, sample_id), position): batch, slot, instance and step cannot change it.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

PRNG = "threefry2x32"
MIN_TEMPERATURE = 1e-3  # below it, logits over temperature may leave float32


@dataclass(frozen=True)
class Sampling:
    """The distribution tokens are drawn from.

    `temperature` 0 is greedy. `top_k` <= 0 and `top_p` = 1 are off; with both on, top-p cuts what
    top-k left, renormalised. `valid_vocab` ids are real, the rest of the vocabulary is padding.
    """

    valid_vocab: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.valid_vocab < 1:
            raise ValueError(f"valid_vocab={self.valid_vocab} must be at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(
                f"rollout.temperature={self.temperature} must be 0 (greedy) or a positive number"
            )
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"rollout.temperature={self.temperature} would overflow the logits: use 0 (greedy) "
                f"or at least {MIN_TEMPERATURE:g}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"rollout.top_p={self.top_p} must lie in (0, 1]; 1 is off")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0


class Draw(NamedTuple):
    """One token a row: `tokens` int32 `[B]`, `log_probs` float32 `[B]`, `gaps` float32 `[B]`.

    `log_probs` are of the distribution the token was drawn from: after temperature, top-k, top-p
    and the vocabulary mask. A greedy draw has probability 1, so its log-probability is 0.

    `gaps` tell how far the draw is from another outcome: the smaller of the difference between the
    two best perturbed logits and the distance to the top-k / top-p cut (in logits, or in cumulated
    probability). Two computations whose logits differ by less than half of it draw the same token.
    None where they were not asked for.
    """

    tokens: Array
    log_probs: Array
    gaps: Array | None


def sample_keys(seed_key: Any, sample_ids: Int[Array, " B"], positions: Int[Array, " B"]) -> Any:
    """Keys `[B]`, fold_in(fold_in(seed_key, sample_id), position of the response token)."""
    return jax.vmap(lambda i, t: jax.random.fold_in(jax.random.fold_in(seed_key, i), t))(
        sample_ids, positions
    )


def check_key(seed_key: Any) -> None:
    """Refuse a generator whose numbers would change with the rows that are drawn together."""
    implementation = str(jax.random.key_impl(seed_key))
    if implementation != PRNG:
        raise ValueError(
            f"seed_key uses {implementation!r}; draws that belong to the sample need {PRNG!r}, "
            f"because others give other numbers under vmap: jax.random.key(seed, impl={PRNG!r})"
        )


def sample(logits: Float[Array, "B V"], keys: Any, sampling: Sampling, *, gaps: bool) -> Draw:
    """Draw one token a row from softmax(logits / temperature), cut to top-k and top-p.

    `logits` are float32 and raw (TypeError otherwise); `keys` `[B]` are those of `sample_keys`,
    unused when greedy. Ties at the cut are kept.
    """
    if logits.dtype != jnp.float32:
        raise TypeError(f"logits must be float32, not {logits.dtype}")
    if sampling.valid_vocab < logits.shape[-1]:
        real = jnp.arange(logits.shape[-1]) < sampling.valid_vocab
        logits = jnp.where(real, logits, -jnp.inf)
    if sampling.greedy:
        tokens = _first_best(logits, sampling.valid_vocab)
        return Draw(tokens, jnp.zeros(tokens.shape), _lead(logits, tokens) if gaps else None)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    logits, margin = _cut(logits, sampling, gaps)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    perturbed = logits + noise
    tokens = _first_best(perturbed, sampling.valid_vocab)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
    if not gaps:
        return Draw(tokens, log_probs, None)
    lead = _lead(perturbed, tokens)
    return Draw(tokens, log_probs, lead if margin is None else jnp.minimum(lead, margin))


def _first_best(scores: Array, valid_vocab: int) -> Array:
    """argmax, int32 `[B]`, in two passes: XLA's argmax on CPU is four times slower (measured).

    A row with NaN gets the last real id, and log-probability NaN.
    """
    size = scores.shape[-1]
    at_top = scores == jnp.max(scores, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(at_top, jnp.arange(size, dtype=jnp.int32), size), axis=-1)
    return jnp.minimum(first, min(valid_vocab, size) - 1)


def _lead(scores: Array, best: Array) -> Array:
    """How far the best score is ahead of the next, `[B]` (inf when nothing else is possible)."""
    top = jnp.take_along_axis(scores, best[:, None], axis=-1)[:, 0]
    others = jnp.where(jnp.arange(scores.shape[-1]) == best[:, None], -jnp.inf, scores)
    return top - jnp.max(others, axis=-1)


def _cut(logits: Array, sampling: Sampling, gaps: bool) -> tuple[Array, Array | None]:
    """Logits with what top-k and top-p drop at -inf, and the distance to the cut `[B]`.

    Top-p keeps the fewest most likely tokens whose probabilities reach `top_p`.
    """
    use_k = 0 < sampling.top_k < sampling.valid_vocab
    if not use_k and sampling.top_p == 1.0:
        return logits, None
    if sampling.top_p == 1.0:
        ordered = jax.lax.top_k(logits, sampling.top_k + 1)[0]
        kept = jnp.full(logits.shape[:1], sampling.top_k, jnp.int32)
        margin = None
    else:
        ordered = -jnp.sort(-logits, axis=-1)
        ranks = jnp.arange(logits.shape[-1])
        head = jnp.where(ranks < sampling.top_k, ordered, -jnp.inf) if use_k else ordered
        reached = jnp.cumsum(jax.nn.softmax(head, axis=-1), axis=-1)
        before = jnp.concatenate([jnp.zeros_like(reached[:, :1]), reached[:, :-1]], axis=-1)
        inside = (before < sampling.top_p) & (head > -jnp.inf)
        kept = jnp.sum(inside, axis=-1)
        # Between the last kept token and the first dropped one, cumulated probability passes top_p.
        near = jnp.abs(before - sampling.top_p)
        edge = (ranks == kept[:, None] - 1) | (ranks == kept[:, None])
        margin = jnp.min(jnp.where(edge & (ranks > 0), near, jnp.inf), axis=-1)
    last = jnp.take_along_axis(ordered, kept[:, None] - 1, axis=-1)
    cut = jnp.where(logits >= last, logits, -jnp.inf)
    if not gaps:
        return cut, None
    following = jnp.minimum(kept, ordered.shape[-1] - 1)[:, None]
    step = (last - jnp.take_along_axis(ordered, following, axis=-1))[:, 0]
    step = jnp.where(kept < ordered.shape[-1], step, jnp.inf)
    return cut, step if margin is None else jnp.minimum(margin, step)
