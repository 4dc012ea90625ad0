"""Scoring passes: pure functions of parameters and a `SequenceBatch`, jitted by the scorer.

Everything per response token is response-aligned `[B, R]` and 0 beneath the mask; everything that
comes out is float32, whatever `dtype` the model computes in. The mask follows from the lengths, and
token ids beneath it are read but never matter. `rows` is the sharding of activations over rows
(see `transformer.forward`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fuse_jax.models import heads, transformer
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.transformer import Params
from fuse_jax.rl.kl import full_kl
from fuse_jax.rl.masked import response_mask
from fuse_jax.samples import SequenceBatch


def log_prob_pass(
    arch: Architecture,
    params: Params,
    batch: SequenceBatch,
    *,
    length: int,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    chunk: int = 0,
    dtype: Any = jnp.float32,
    rows: Any = None,
) -> Float[Array, "B R"]:
    """Log-probability of each response token under a language model.

        log_probs[b, t] = log softmax(logits(prompt, response[:t]) / temperature)[response[t]]

    The distribution is the one sampling draws from at this `temperature` with ids from
    `valid_vocab` on left out, before any top-k or top-p cut.

    Args:
      batch: right-padded rows, `tokens` int32 `[B, T]`.
      length: R, the columns of the result; responses must not be longer.
      chunk: positions whose logits `[B, chunk, V]` exist at one time; 0 = all R.

    Returns:
      float32 `[B, R]`, nats, 0 beneath the mask.
    """
    tokens, prompt_lengths, response_lengths = map(jnp.asarray, batch)
    hidden = transformer.forward(arch, params, tokens, dtype=dtype, rows=rows)
    statistics = heads.token_statistics(
        params,
        heads.before_response(hidden, prompt_lengths, length),
        heads.response_tokens(tokens, prompt_lengths, length),
        temperature=temperature,
        valid_vocab=valid_vocab,
        chunk=chunk,
    )
    # Not a product: a masked target may be a padding id, whose log-probability is -inf.
    return jnp.where(response_mask(response_lengths, length) > 0, statistics.log_probs, 0.0)


def full_kl_pass(
    arch: Architecture,
    params: Params,
    ref_arch: Architecture,
    ref_params: Params,
    batch: SequenceBatch,
    *,
    length: int,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    chunk: int = 0,
    dtype: Any = jnp.float32,
    rows: Any = None,
) -> Float[Array, "B R"]:
    """KL(actor || reference) of the next-token distributions, summed exactly over the vocabulary.

        kl[b, t] = sum_v p_v (log p_v - log q_v) at the state before response token t

    Two logit arrays `[B, chunk, V]` exist at one time. Arguments as in `log_prob_pass`; `params`
    are the actor's. The two models share the vocabulary; `valid_vocab` cuts both.

    Returns:
      float32 `[B, R]`, nats, 0 beneath the mask.
    """
    tokens, prompt_lengths, response_lengths = map(jnp.asarray, batch)

    def states_of(arch: Architecture, params: Params) -> Array:
        hidden = transformer.forward(arch, params, tokens, dtype=dtype, rows=rows)
        return heads.before_response(hidden, prompt_lengths, length)

    states, ref_states = states_of(arch, params), states_of(ref_arch, ref_params)

    def one(states: Array, ref_states: Array) -> Array:
        logits, ref_logits = (
            heads.lm_logits(weights, x, temperature=temperature, valid_vocab=valid_vocab)
            for weights, x in ((params, states), (ref_params, ref_states))
        )
        return full_kl(logits, ref_logits)

    if 0 < chunk < length:
        divergence = heads.map_chunks(one, chunk, states, ref_states)
    else:
        divergence = one(states, ref_states)
    return jnp.where(response_mask(response_lengths, length) > 0, divergence, 0.0)


def value_pass(
    arch: Architecture,
    params: Params,
    batch: SequenceBatch,
    *,
    length: int,
    dtype: Any = jnp.float32,
    rows: Any = None,
) -> tuple[Float[Array, "B R"], Float[Array, " B"]]:
    """The critic's value of every state of the response.

    Returns:
      `values` float32 `[B, length]`: of the state before response token t, 0 beneath the mask, and
      `last_values` float32 `[B]`: of the state after the last response token (after the prompt
      where the response is empty), from which a truncated response is bootstrapped.
    """
    tokens, prompt_lengths, response_lengths = map(jnp.asarray, batch)
    hidden = transformer.forward(arch, params, tokens, dtype=dtype, rows=rows)
    values = heads.scalars(params, heads.before_response(hidden, prompt_lengths, length))
    values = jnp.where(response_mask(response_lengths, length) > 0, values, 0.0)
    return values, _at_end(params, hidden, prompt_lengths + response_lengths)


def reward_pass(
    arch: Architecture,
    params: Params,
    batch: SequenceBatch,
    *,
    dtype: Any = jnp.float32,
    rows: Any = None,
) -> Float[Array, " B"]:
    """The reward model's score of each sequence, float32 `[B]`, read at its last response token.

    An empty response is scored at the last prompt token.
    """
    tokens, prompt_lengths, response_lengths = map(jnp.asarray, batch)
    hidden = transformer.forward(arch, params, tokens, dtype=dtype, rows=rows)
    return _at_end(params, hidden, prompt_lengths + response_lengths)


def _at_end(params: Params, hidden: Array, lengths: Array) -> Array:
    return heads.scalars(params, heads.at_last_token(hidden, lengths))
