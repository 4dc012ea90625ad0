"""The scorer against an oracle that runs every sample alone, and the bits it promises."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuse_jax.buckets import Bucket, make_buckets
from fuse_jax.config import MeshConfig
from fuse_jax.models import transformer
from fuse_jax.models.architecture import Architecture
from fuse_jax.placement.mesh import make_mesh, row_shards, single_device_mesh
from fuse_jax.placement.sharding import parameter_specs, shard
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Model, PassOptions, Scored
from fuse_jax.scoring.scorer import Scorer

COLUMNS = ("ref_log_probs", "log_probs", "full_kl", "values", "scores")
FIELDS = ("ref_log_probs", "log_probs", "full_kl", "values", "last_value", "score")
TEMPERATURE, VALID_VOCAB = 0.7, 37
OPTIONS = PassOptions(TEMPERATURE, VALID_VOCAB, chunk=5)
# Prompt and response lengths: bucket edges (16 and 32 tokens), nothing, one token, the longest.
LENGTHS = ((5, 11), (5, 12), (9, 7), (1, 16), (8, 24), (16, 0), (1, 0), (15, 1), (2, 14), (31, 1))


@pytest.fixture(scope="module")
def samples(make_sample):
    return [make_sample(i, *lengths) for i, lengths in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def scorer(models):
    """Two buckets, 8 rows of 16 tokens and 4 rows of 32; all of it compiled once."""
    buckets = make_buckets((16, 32), 128, 1)
    made = Scorer(single_device_mesh(), buckets, COLUMNS, max_response=24, options=OPTIONS)
    # Shapes suffice to compile: weights may still be on their way.
    shapes = {
        role: Model(arch, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
        for role, (arch, params) in models.items()
    }
    assert made.precompile(shapes) == 10
    return made


@pytest.fixture(scope="module")
def alone(scorer, models, samples):
    """Bits of each sample scored by itself, by sample id."""
    return {sample.sample_id: bits(scorer.score([sample], models)[0]) for sample in samples}


def bits(scored: Scored) -> bytes:
    found = (getattr(scored, field) for field in FIELDS)
    return b"|".join(b"" if x is None else np.asarray(x).tobytes() for x in found)


@functools.partial(jax.jit, static_argnums=0)
def hidden_of(arch, trunk, tokens):
    return transformer.forward(arch, trunk, tokens)[0]


def log_softmax(model: Model, hidden: np.ndarray) -> np.ndarray:
    logits = hidden.astype(np.float64) @ np.asarray(model.params["head"]["kernel"], np.float64)
    logits = logits[:, :VALID_VOCAB] / TEMPERATURE
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def oracle(models: dict[str, Model], sample: Sample) -> Scored:
    """Each pass in numpy float64 on the hidden states of the one, unpadded sequence."""
    tokens = np.concatenate([sample.prompt_tokens, sample.response_tokens])
    prompt, n = len(sample.prompt_tokens), len(sample.response_tokens)
    states = {}
    for role, model in models.items():
        trunk = {name: model.params[name] for name in ("embed", "blocks", "final_norm")}
        states[role] = np.asarray(hidden_of(model.arch, trunk, tokens[None]))
    before = slice(prompt - 1, prompt - 1 + n)

    def scalar(role: str, hidden: np.ndarray) -> np.ndarray:
        head = models[role].params["head"]
        return hidden.astype(np.float64) @ np.asarray(head["kernel"])[:, 0] + head["bias"][0]

    of_actor = log_softmax(models["actor"], states["actor"][before])
    of_reference = log_softmax(models["reference"], states["reference"][before])
    chosen = np.arange(n), sample.response_tokens
    return Scored(
        ref_log_probs=of_reference[chosen],
        log_probs=of_actor[chosen],
        full_kl=np.sum(np.exp(of_actor) * (of_actor - of_reference), -1),
        values=scalar("critic", states["critic"][before]),
        last_value=float(scalar("critic", states["critic"][-1])),
        score=float(scalar("reward_model", states["reward_model"][-1])),
    )


def largest_difference(found: Scored, wanted: Scored) -> float:
    differences = [0.0]
    for field in FIELDS:
        if getattr(found, field) is None:
            continue
        a, b = np.asarray(getattr(found, field)), np.asarray(getattr(wanted, field))
        assert a.shape == b.shape, field
        differences.append(np.max(np.abs(a - b), initial=0.0))
    return max(differences)


def test_every_column_equals_the_unbatched_oracle(scorer, models, samples):
    scored = scorer.score(samples, models)
    for sample, found in zip(samples, scored, strict=True):
        n = len(sample.response_tokens)
        for field in ("ref_log_probs", "log_probs", "full_kl", "values"):
            column = getattr(found, field)
            assert column.dtype == np.float32 and column.shape == (n,)
        assert all(getattr(found, field) is not None for field in FIELDS)
        assert largest_difference(found, oracle(models, sample)) < 1e-5
        assert np.all(found.full_kl > 0) and np.all(found.log_probs < 0)
    assert scored[5].values.size == 0 and math.isfinite(scored[5].score)


def test_arrays_are_zero_beneath_the_mask(scorer, models, samples):
    batch = scorer.batch(0, samples[5:8] + samples[:1])
    lengths = np.array([0, 0, 1, 11, 0, 0, 0, 0])
    mask = np.arange(16) < lengths[:, None]
    for column in ("ref_log_probs", "log_probs", "full_kl", "values"):
        array = np.asarray(scorer.dispatch(column, batch, models).arrays[0])
        assert array.shape == (8, 16) and array.dtype == np.float32
        assert np.all(array[~mask] == 0) and np.all(array[mask] != 0)


def test_bfloat16_inside_float32_outside(scorer, models, samples):
    options = PassOptions(TEMPERATURE, VALID_VOCAB, dtype=jnp.bfloat16)
    columns = ("log_probs", "values")
    half = Scorer(scorer.mesh, scorer.buckets[:1], columns, max_response=24, options=options).score(
        samples[:1], models
    )[0]
    full = scorer.score(samples[:1], models)[0]
    for column in columns:
        found, precise = getattr(half, column), getattr(full, column)
        assert found.dtype == np.float32
        assert 1e-5 < np.max(np.abs(found - precise)) < 0.05 * max(1, np.max(np.abs(precise)))


def test_samples_fall_in_the_bucket_of_their_own_length(scorer, samples):
    assert [scorer.bucket_of(s) for s in samples] == [0, 1, 0, 1, 1, 0, 0, 0, 0, 1]
    assert scorer.group([samples[0]] * 9 + [samples[1]]) == [
        (0, tuple(range(8))),
        (0, (8,)),
        (1, (9,)),
    ]


@given(st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=30))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_bits_depend_on_the_sample_alone(scorer, models, samples, alone, chosen):
    """Any neighbours, any order, any number of them, samples repeated, other groups before."""
    scored = scorer.score([samples[i] for i in chosen], models)
    assert [bits(s) for s in scored] == [alone[i] for i in chosen]
    assert scorer.compilations == 10


@pytest.mark.parametrize("pad_token", [1, 36, 39])
def test_bits_do_not_depend_on_what_lies_beneath_the_mask(
    scorer, models, samples, alone, monkeypatch, pad_token
):
    """Pad ids that equal a sampled token, a likely stop token, or padding of the vocabulary."""
    monkeypatch.setattr(scorer, "pad_token", pad_token)
    assert [bits(s) for s in scorer.score(samples, models)] == [alone[i] for i in range(10)]


def test_a_diverging_neighbour_stays_in_its_row(scorer, models, samples, alone):
    """Not-a-number in one row (a broken embedding row of token 36) reaches no other."""
    table = models["critic"].params["embed"]["embedding"].at[36].set(jnp.nan)
    params = {**models["critic"].params, "embed": {"embedding": table}}
    broken = {**models, "critic": Model(models["critic"].arch, params)}
    clean = [s for s in samples if 36 not in np.r_[s.prompt_tokens, s.response_tokens]]
    bad = Sample(99, np.array([36, 2]), np.array([3, 4, 5]), np.zeros(3, np.float32), False)
    *rest, poisoned = scorer.score([*clean, bad], broken)
    assert np.all(np.isnan(poisoned.values)) and math.isnan(poisoned.last_value)
    assert [bits(s) for s in rest] == [alone[s.sample_id] for s in clean]


def test_readiness_a_sample_and_column_without_waiting(scorer, models, samples):
    """The critic's weights are still on their way; the rest of the table fills up meanwhile."""

    @jax.jit
    def slow(params):
        spun = jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), jnp.ones((400, 400)))
        return jax.tree.map(lambda x: x + 0 * spun[0, 0], params)

    jax.block_until_ready(slow(models["critic"].params))  # compiled
    before = scorer.compilations
    arriving = Model(models["critic"].arch, slow(models["critic"].params))
    submission = scorer.submit(samples, {**models, "critic": arriving})
    at_once = submission.ready()
    assert set(at_once) == set(COLUMNS) and at_once["values"].shape == (len(samples),)
    assert not at_once["values"].any()
    scored = scorer.collect(submission)
    assert all(column.all() for column in submission.ready().values())
    assert largest_difference(scored[4], oracle(models, samples[4])) < 1e-5
    assert scorer.compilations == before


def test_small_units_fill_the_same_table(scorer, models, samples, alone):
    """Column by column and batch by batch, as inter-stage fusion does it."""
    scored = {s.sample_id: Scored() for s in samples}
    for column in reversed(COLUMNS):
        for bucket, members in reversed(scorer.group(samples)):
            for i in members:  # one at a time
                pending = scorer.dispatch(column, scorer.batch(bucket, [samples[i]]), models)
                jax.block_until_ready(pending.arrays)
                assert pending.is_ready()
                pending.write([scored[i]])
    assert {i: bits(s) for i, s in scored.items()} == alone


def test_nothing_compiles_after_warm_up(scorer, models, make_sample, monkeypatch):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    scorer.score([make_sample(50 + i, 1 + i, i) for i in range(16)], models)
    assert not compiled and scorer.compilations == 10
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
    assert compiled  # the listener does hear compilations


def test_shapes_are_listed_and_late_ones_are_logged(models, samples, monkeypatch, caplog):
    logging.get_absl_logger().propagate = True
    monkeypatch.setattr(Scorer, "_compile", lambda *_: lambda params, batch: ())
    buckets = (Bucket(16, 2), Bucket(32, 1))
    made = Scorer(single_device_mesh(), buckets, ["scores"], max_response=24)
    assert [tuple(s) for s in made.shapes()] == [("scores", 2, 16, 16), ("scores", 1, 32, 24)]
    made.submit([samples[0]], models)
    assert made.compilations == 1 and not caplog.records  # not warmed up: nothing is late
    assert made.precompile(models) == 1
    other = Model(Architecture(vocab_size=48), models["reward_model"].params)
    made.submit([samples[1]], {"reward_model": other})
    assert "compiles after warm-up: Shape(column='scores', rows=1, length=32" in caplog.text
    assert made.compilations == 3


@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        pytest.param((8, 1, 1), ("ref_log_probs", "values"), marks=pytest.mark.slow),
        ((2, 2, 2), ("ref_log_probs", "full_kl", "values", "scores")),
    ],
)
def test_meshes_give_the_same(shape, columns, models, samples):
    mesh = make_mesh(MeshConfig(*shape))
    buckets = make_buckets((32,), 32, row_shards(mesh))
    scorer = Scorer(mesh, buckets, columns, max_response=24, options=OPTIONS)
    sharded = {
        role: Model(
            model.arch, shard(model.params, parameter_specs(model.arch, model.params, mesh))
        )
        for role, model in models.items()
    }
    scored = scorer.score(samples, sharded)
    worst = max(largest_difference(s, oracle(models, x)) for s, x in zip(scored, samples))
    assert worst < 1e-5
    again = scorer.score(samples[::-1], sharded)
    assert [bits(s) for s in again[::-1]] == [bits(s) for s in scored]
    assert scorer.compilations == len(columns)


def test_models_are_left_alone(scorer, models, samples):
    before = jax.tree.map(np.array, {role: model.params for role, model in models.items()})
    scorer.score(samples, models)
    after = {role: model.params for role, model in models.items()}
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, after)))


@pytest.mark.parametrize(
    ("prompt", "response", "words"),
    [
        ([], [1], "empty prompt"),
        ([1] * 9, [1] * 24, "fits no bucket"),
        ([1], [1] * 25, "max_response=24"),
        ([40], [1], "outside the vocabulary of 40"),
        ([-1], [1], "negative token ids"),
        ([39], [37], "valid_vocab=37"),
    ],
)
def test_what_cannot_be_scored_is_refused(scorer, models, prompt, response, words):
    sample = Sample(7, np.array(prompt), np.array(response), np.zeros(1, np.float32), False)
    with pytest.raises(ValueError, match=words):
        scorer.submit([sample], models)


def test_bad_settings_are_refused(scorer, models, samples):
    mesh = make_mesh(MeshConfig(8, 1, 1))
    with pytest.raises(ValueError, match=r"row_multiple=8"):
        Scorer(mesh, (Bucket(16, 4),), COLUMNS, max_response=8)
    with pytest.raises(ValueError, match=r"columns=\['value'\]: choose"):
        Scorer(mesh, (Bucket(16, 8),), ["value"], max_response=8)  # type: ignore[list-item]
    with pytest.raises(KeyError, match="'critic'"):
        scorer.submit(samples, {k: v for k, v in models.items() if k != "critic"})
    assert scorer.score([], models) == []
