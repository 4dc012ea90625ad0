"""The slot engine: it agrees with a full forward pass, and a row's bits depend on the row only."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuse_jax.models import heads, transformer
from fuse_jax.rollout import programs
from fuse_jax.rollout.batcher import Request, prefill_arrays
from fuse_jax.rollout.engine import Engine, Rows
from fuse_jax.rollout.sampling import sample as draw_tokens
from fuse_jax.rollout.sampling import sample_keys

SLOTS, ROWS, NOWHERE = 8, 8, 8


def prefill(setup, engine, ids, *, cap=50, prompts=None, bucket=20):
    prompts = setup.prompts if prompts is None else prompts
    requests = [Request(i, prompts[i], cap) for i in ids]
    arrays = prefill_arrays(requests, ROWS, bucket)
    return engine.prefill(engine.place_params(setup.params), *arrays, setup.seed_key)


def place(slots):
    index = np.full(ROWS, NOWHERE, np.int32)
    index[: len(slots)] = slots
    return index


def decode(setup, engine, state, chunks):
    """All tokens and log-probs `[steps, slots]` of `chunks` dispatches."""
    tokens, log_probs = [np.zeros((0, SLOTS), np.int32)], [np.zeros((0, SLOTS), np.float32)]
    for _ in range(chunks):
        params = engine.place_params(setup.params)
        state, chunk = engine.generate(params, state, setup.seed_key)
        tokens.append(np.asarray(chunk.tokens))
        log_probs.append(np.asarray(chunk.log_probs))
    return state, np.concatenate(tokens), np.concatenate(log_probs)


def assert_rows_equal(left: Rows, right: Rows, left_rows: list, right_rows: list) -> None:
    for name, a, b in zip(Rows._fields, left, right, strict=True):
        axis = 2 if name in ("keys", "values") else 0
        one, other = (
            np.take(np.asarray(a), left_rows, axis),
            np.take(np.asarray(b), right_rows, axis),
        )
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_log_probs_are_those_of_a_full_forward_pass(setup, uncapped):
    ids = [0, 1, 2, 3]
    rows, first = prefill(setup, uncapped, ids)
    state = uncapped.insert(uncapped.init_decode_state(), rows, place([5, 2, 7, 0]))
    _, tokens, log_probs = decode(setup, uncapped, state, 12)
    # Behind a causal sequence anything may stand: all are of one length, to compile once.
    forward = jax.jit(lambda tokens: transformer.forward(uncapped.arch, setup.params, tokens))
    for row, (sample, slot) in enumerate(zip(ids, [5, 2, 7, 0], strict=True)):
        prompt = setup.prompts[sample]
        response = np.concatenate([[first.tokens[row]], tokens[:, slot]])
        sampled = np.concatenate([[first.log_probs[row]], log_probs[:, slot]])
        whole = np.zeros((1, 20 + len(response)), np.int32)
        whole[0, : len(prompt) + len(response)] = np.concatenate([prompt, response])
        hidden = forward(whole)
        before = heads.before_response(hidden, jnp.array([len(prompt)]), len(response))
        given = heads.token_statistics(
            setup.params, before, jnp.asarray(response[None]), temperature=0.8, valid_vocab=37
        )
        np.testing.assert_allclose(sampled, given.log_probs[0], atol=1e-5)
        assert sampled.dtype == np.float32
        # And each draw used the noise of this sample and this position.
        steps = jnp.arange(len(response))
        keys = sample_keys(setup.seed_key, jnp.full_like(steps, sample), steps)
        logits = heads.lm_logits(setup.params, before[0])
        again = draw_tokens(logits, keys, uncapped.sampling, gaps=True)
        sure = np.asarray(again.gaps) > 1e-4
        assert sure.sum() > 40
        np.testing.assert_array_equal(response[sure], np.asarray(again.tokens)[sure])


def test_decoded_cache_is_that_of_a_prefill_of_the_same_tokens(setup, uncapped):
    rows, first = prefill(setup, uncapped, [1])
    state = uncapped.insert(uncapped.init_decode_state(), rows, place([3]))
    state, tokens, _ = decode(setup, uncapped, state, 2)
    grown = np.concatenate([setup.prompts[1], first.tokens[:1], tokens[:, 3]])
    assert len(grown) == 17  # so the second block of 16 positions was entered
    again, _ = prefill(setup, uncapped, [0], prompts=[grown[:-1]])
    decoded = uncapped.extract(state, place([3]))
    for kept, fresh in ((decoded.keys, again.keys), (decoded.values, again.values)):
        np.testing.assert_allclose(kept[:, :1, 0], fresh[:, :1, 0], atol=1e-5)
    assert decoded.lengths[0] == 16 and decoded.generated[0] == 9


def test_slot_and_neighbours_do_not_change_a_bit(setup, uncapped):
    alone, _ = prefill(setup, uncapped, [6])
    state = uncapped.insert(uncapped.init_decode_state(), alone, place([0]))
    _, lonely, lonely_log_probs = decode(setup, uncapped, state, 3)

    crowd, _ = prefill(setup, uncapped, [3, 4, 6, 5])
    assert_rows_equal(alone, crowd, [0], [2])
    state = uncapped.insert(uncapped.init_decode_state(), crowd, place([1, 2, 6, 4]))
    _, tokens, log_probs = decode(setup, uncapped, state, 3)
    np.testing.assert_array_equal(lonely[:, 0], tokens[:, 6])
    np.testing.assert_array_equal(lonely_log_probs[:, 0], log_probs[:, 6])
    assert not np.array_equal(tokens[:, 1], tokens[:, 2])


def test_a_longer_neighbour_does_not_change_a_bit(setup, uncapped):
    """The block count follows the longest live row; the short row must not notice."""
    short = np.array([4, 5], np.int32)
    state = uncapped.init_decode_state()
    rows, _ = prefill(setup, uncapped, [0], prompts=[short])
    state = uncapped.insert(state, rows, place([1]))
    _, alone, alone_log_probs = decode(setup, uncapped, state, 2)
    long_rows, _ = prefill(setup, uncapped, [3])
    state = uncapped.insert(uncapped.init_decode_state(), long_rows, place([0]))
    state, _, _ = decode(setup, uncapped, state, 6)  # 44 positions: three blocks
    state = uncapped.insert(state, rows, place([1]))
    _, tokens, log_probs = decode(setup, uncapped, state, 2)
    np.testing.assert_array_equal(alone[:, 1], tokens[:, 1])
    np.testing.assert_array_equal(alone_log_probs[:, 1], log_probs[:, 1])


@pytest.mark.parametrize("chunks_before", [0, 1, 5])
def test_a_moved_slot_goes_on_bit_equal(setup, uncapped, elsewhere, chunks_before):
    rows, _ = prefill(setup, uncapped, [2, 3])
    state = uncapped.insert(uncapped.init_decode_state(), rows, place([0, 5]))
    state, _, _ = decode(setup, uncapped, state, chunks_before)
    moved = uncapped.extract(state, place([5, 0]))
    assert moved.done.tolist() == [False] * 2 + [True] * 6  # padding rows are done
    _, stayed, stayed_log_probs = decode(setup, uncapped, state, 4)

    target = elsewhere.insert(elsewhere.init_decode_state(), elsewhere.place(moved), place([7, 0]))
    assert target.keys.devices() == {jax.devices()[2]}
    _, tokens, log_probs = decode(setup, elsewhere, target, 4)
    np.testing.assert_array_equal(stayed[:, [5, 0]], tokens[:, [7, 0]])
    np.testing.assert_array_equal(stayed_log_probs[:, [5, 0]], log_probs[:, [7, 0]])


def test_done_and_released_slots_are_left_alone(setup, uncapped):
    rows, _ = prefill(setup, uncapped, [0, 1, 2], cap=6)
    state = uncapped.insert(uncapped.init_decode_state(), rows, place([0, 1, 2]))
    long_rows, _ = prefill(setup, uncapped, [3])
    state = uncapped.insert(state, long_rows, place([3]))
    state = uncapped.release(state, place([1]))
    before = uncapped.extract(state, place([1]))
    state, _, _ = decode(setup, uncapped, state, 2)
    assert_rows_equal(uncapped.extract(state, place([1])), before, [0], [0])
    done = uncapped.extract(state, place([0, 1, 2, 3]))
    assert done.done[:4].tolist() == [True, True, True, False]
    assert done.generated[:4].tolist() == [6, 1, 6, 9]
    state, chunk = uncapped.generate(uncapped.place_params(setup.params), state, setup.seed_key)
    later = uncapped.extract(state, place([0, 1, 2, 3]))
    assert_rows_equal(done, later, [0, 1, 2], [0, 1, 2])
    assert chunk.counts.tolist() == [0, 0, 0, 4, 0, 0, 0, 0]


def test_insert_clears_what_the_last_guest_left(setup, uncapped):
    rows, _ = prefill(setup, uncapped, [0])
    clean = uncapped.insert(uncapped.init_decode_state(), rows, place([2]))
    dirty = uncapped.init_decode_state()
    bad = jnp.full_like(dirty.keys, jnp.nan)
    dirty = uncapped.insert(dirty._replace(keys=bad, values=bad + 0), rows, place([2]))
    # Far enough to read blocks that the prompt did not fill.
    _, wanted, wanted_log_probs = decode(setup, uncapped, clean, 9)
    _, tokens, log_probs = decode(setup, uncapped, dirty, 9)
    np.testing.assert_array_equal(wanted[:, 2], tokens[:, 2])
    np.testing.assert_array_equal(wanted_log_probs[:, 2], log_probs[:, 2])


def test_stop_tokens_and_caps_end_a_row(setup):
    engine = setup.engine
    rows, _ = prefill(setup, engine, [0, 1, 2, 3], cap=9)
    state = engine.insert(engine.init_decode_state(), rows, place([0, 1, 2, 3]))
    state, tokens, _ = decode(setup, engine, state, 3)
    generated, done = np.asarray(state.generated), np.asarray(state.done)
    assert done.all()
    for slot in range(4):
        response = [int(rows.last_tokens[slot]), *tokens[: generated[slot] - 1, slot]]
        assert len(response) <= 9
        assert not set(response[:-1]) & {3, 11}
        assert response[-1] in (3, 11) or len(response) == 9


def test_a_chunk_ends_when_all_slots_are_done(setup, uncapped):
    rows, _ = prefill(setup, uncapped, [0], cap=2)
    state = uncapped.insert(uncapped.init_decode_state(), rows, place([0]))
    state, chunk = uncapped.generate(uncapped.place_params(setup.params), state, setup.seed_key)
    assert int(chunk.steps) == 1 and int(chunk.counts[0]) == 1
    _, chunk = uncapped.generate(uncapped.place_params(setup.params), state, setup.seed_key)
    assert int(chunk.steps) == 0 and not chunk.counts.any()


def test_the_cache_is_updated_in_place(setup, uncapped):
    """No step may copy the whole cache: scratch memory stays below one cache array."""
    big = dataclasses.replace(
        uncapped, rollout=dataclasses.replace(uncapped.rollout, max_new_tokens=2000)
    )
    state = big.init_decode_state()
    program = programs.generate.lower(big, setup.params, state, setup.seed_key).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < state.keys.nbytes / 4
    assert memory.alias_size_in_bytes >= 2 * state.keys.nbytes


def test_state_is_donated(setup, uncapped):
    rows, _ = prefill(setup, uncapped, [0])
    empty = uncapped.init_decode_state()
    state = uncapped.insert(empty, rows, place([0]))
    uncapped.generate(uncapped.place_params(setup.params), state, setup.seed_key)
    assert empty.keys.is_deleted() and state.keys.is_deleted()
    assert not rows.keys.is_deleted()


@pytest.mark.slow
def test_bfloat16_stays_close_to_float32(setup, uncapped):
    narrow = dataclasses.replace(uncapped, dtype="bfloat16")
    rows, draw = prefill(setup, narrow, [0, 1, 2, 3])
    assert rows.keys.dtype == jnp.bfloat16 and draw.log_probs.dtype == jnp.float32
    state = narrow.insert(narrow.init_decode_state(), rows, place([0, 1, 2, 3]))
    _, tokens, log_probs = decode(setup, narrow, state, 3)
    for slot in range(4):
        prompt = setup.prompts[slot]
        response = np.concatenate([draw.tokens[slot : slot + 1], tokens[:, slot]])
        whole = jnp.asarray(np.concatenate([prompt, response])[None])
        hidden = transformer.forward(narrow.arch, setup.params, whole, dtype=jnp.bfloat16)
        before = heads.before_response(hidden, jnp.array([len(prompt)]), len(response))
        given = heads.token_statistics(
            setup.params, before, jnp.asarray(response[None]), temperature=0.8, valid_vocab=37
        )
        np.testing.assert_allclose(log_probs[:, slot], given.log_probs[0, 1:], atol=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"valid_vocab": 41}, "valid_vocab=41"),
        ({"slots": 0}, "rollout.slots"),
        ({"chunk": 0}, "rollout.chunk"),
        ({"prompt_buckets": (4, 8)}, "rollout.prompt_buckets"),
        ({"top_p": 0.0}, "rollout.top_p"),
    ],
)
def test_impossible_settings_are_refused_by_name(setup, changes, message):
    rollout = {k: v for k, v in changes.items() if k != "valid_vocab"}
    with pytest.raises(ValueError, match=message):
        Engine(
            setup.engine.arch,
            dataclasses.replace(setup.engine.rollout, **rollout),
            (),
            changes.get("valid_vocab", 37),
        )


def test_shapes_that_would_recompile_are_refused(setup):
    engine = setup.engine
    arrays = prefill_arrays([], ROWS, 12)
    with pytest.raises(ValueError, match="bucket"):
        engine.prefill(setup.params, *arrays, setup.seed_key)
    arrays = prefill_arrays([], ROWS + 1, 20)
    with pytest.raises(ValueError, match="prefill_rows"):
        engine.prefill(setup.params, *arrays, setup.seed_key)
    with pytest.raises(ValueError, match="geometries"):
        engine.insert(engine.init_decode_state(), prefill(setup, engine, [0])[0], np.arange(2))
    for length in (0, 21):
        with pytest.raises(ValueError, match="max_prompt_length"):
            engine.bucket_of(length)
    assert [engine.bucket_of(n) for n in (1, 8, 9, 20)] == [8, 8, 20, 20]
