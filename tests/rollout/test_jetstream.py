"""The adapter against the real google-jetstream 0.2.2; the rest runs without it."""

from __future__ import annotations

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

from fuse_jax.rollout.batcher import generate_samples
from fuse_jax.rollout.jetstream import Verbs, jetstream_engine


class _Result(dict):
    pass


class _Plain(Verbs):
    """The verbs without JetStream's base class."""

    _result_tokens = _Result


def _responses(adapter, prompts, results_of):
    """Drive it as JetStream's orchestrator does: insert, then one generate a token."""
    params = adapter.load_params()
    state = adapter.init_decode_state()
    assert adapter.max_concurrent_decodes == 8 and adapter.samples_per_slot == 1
    slots = [6, 1, 3]
    for prompt, slot in zip(prompts, slots, strict=True):
        padded = jnp.asarray(np.pad(prompt, (0, 20 - len(prompt)), constant_values=1))
        prefix = adapter.prefill(params=params, padded_tokens=padded, true_length=len(prompt))
        state = adapter.insert(prefix, state, slot)
    tokens: dict[int, list[int]] = {slot: [] for slot in slots}
    for _ in range(53):
        state, result = adapter.generate(params, state)
        for slot in range(8):
            token, valid, length = results_of(result, slot)
            if valid:
                tokens[slot].append(token)
                assert length == len(tokens[slot])
    return [tokens[slot] for slot in slots]


def _expected(setup, engine, prompts):
    samples = generate_samples(engine, setup.params, prompts, seed_key=setup.seed_key)
    by_id = {sample.sample_id: sample.response_tokens.tolist() for sample in samples}
    return [by_id[i] for i in range(len(prompts))]


def test_every_token_comes_out_once_the_first_included(setup, single_steps):
    adapter = _Plain(single_steps, setup.params, setup.seed_key, "")
    prompts = setup.prompts[1:4]
    responses = _responses(adapter, prompts, lambda result, slot: map(int, result["data"][slot]))
    assert responses == _expected(setup, single_steps, prompts)


def test_the_real_engine_api(setup, single_steps):
    engine_api = pytest.importorskip("jetstream.engine.engine_api")
    adapter = jetstream_engine(
        single_steps, setup.params, seed_key=setup.seed_key, tokenizer_path="tokenizer.model"
    )
    assert isinstance(adapter, engine_api.Engine)
    assert adapter.get_tokenizer().path == "tokenizer.model"
    assert adapter.max_prefill_length == 20 and adapter.colocated_cpus is None
    assert adapter.mesh is single_steps.mesh

    def results_of(result, slot):
        assert isinstance(result, engine_api.ResultTokens)
        result.copy_to_host_async()
        data = result.convert_to_numpy().get_result_at_slot(slot)
        return int(data.tokens[0, 0]), bool(data.valid[0, 0]), int(data.lengths[0])

    prompts = setup.prompts[1:4]
    responses = _responses(adapter, prompts, results_of)
    assert responses == _expected(setup, single_steps, prompts)


def test_a_missing_package_and_long_chunks_are_named(setup, single_steps):
    with pytest.raises(ValueError, match=r"rollout\.chunk=1"):
        jetstream_engine(setup.engine, setup.params, seed_key=setup.seed_key)
    if importlib.util.find_spec("jetstream") is None:
        with pytest.raises(ImportError, match=r"fuse_jax\[jetstream\]"):
            jetstream_engine(single_steps, setup.params, seed_key=setup.seed_key)
    with pytest.raises(NotImplementedError):
        _Plain(single_steps, setup.params, setup.seed_key, "").prefill(
            params=setup.params,
            existing_prefix=single_steps.init_decode_state(),
            padded_tokens=jnp.zeros(4),
            true_length=4,
        )
