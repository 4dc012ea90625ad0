"""Hugging Face directories: golden logits, round trips, config forms, shardings, refusals."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fuse_jax.config import MeshConfig
from fuse_jax.models import heads, hf, hf_config, safetensors_io, streaming, transformer
from fuse_jax.models.architecture import Architecture, RopeScaling
from fuse_jax.placement.mesh import make_mesh
from fuse_jax.placement.sharding import parameter_specs, shard

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))


def head_of(name):
    return "scalar" if "scalar" in name else "lm"


def load(directory, head="lm", shardings=None, **options):
    arch = hf.read_architecture(directory)
    return arch, hf.load_params(directory, arch, shardings, head=head, **options)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def copied(tmp_path):
    """A copy of a golden directory, to be broken."""

    def copy(name):
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return directory


def edit_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return directory


# ---------------------------------------------------------------- golden files


def test_all_golden_models_are_here():
    assert len(NAMES) == 8


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_torch_transformers(name):
    expected = np.load(GOLDEN / name / "expected.npz")
    head = head_of(name)
    arch, params = load(GOLDEN / name, head)

    @jax.jit
    def logits(params, tokens):
        hidden = transformer.forward(arch, params, tokens)
        return (
            heads.scalars(params, hidden) if head == "scalar" else heads.lm_logits(params, hidden)
        )

    got = logits(params, expected["tokens"])
    np.testing.assert_allclose(got, expected["logits"], atol=1e-4)


def test_golden_architectures_cover_the_variants():
    archs = {name: hf.read_architecture(GOLDEN / name) for name in NAMES}
    assert archs["llama_tied"].tie_embeddings and not archs["llama_linear"].tie_embeddings
    assert archs["llama_linear"].rope_scaling == RopeScaling("linear", 4.0)
    assert archs["llama_llama3"].rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    assert (archs["llama_llama3"].head_dim, archs["llama_tied"].head_dim) == (16, 8)
    assert archs["llama_biases"].attention_bias and archs["qwen2_tied"].attention_bias
    assert not archs["llama_tied"].attention_bias
    assert (archs["qwen2_untied"].num_kv_heads, archs["qwen2_untied"].num_heads) == (1, 4)


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", ["llama_biases", "llama_scalar", "qwen2_tied", "llama_llama3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_and_import_are_equal_in_the_dtype_written(name, dtype, tmp_path):
    head = head_of(name)
    arch, params = load(GOLDEN / name, head)
    # Bits that bfloat16 cannot hold.
    params = jax.tree.map(lambda x: x * 1.001, params)
    hf.save_params(tmp_path / "out", arch, params, dtype=dtype, head=head)
    again, back = load(tmp_path / "out", head)
    assert again == arch
    assert_same(back, jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params))
    _, narrow = load(tmp_path / "out", head, dtype=jnp.bfloat16)
    assert_same(narrow, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


def test_exported_tensors_have_the_names_and_bits_of_the_original(tmp_path):
    for name in ("llama_llama3", "llama_tied"):  # bfloat16 and float32
        original = load_file(GOLDEN / name / "model.safetensors")
        dtype = str(original["model.norm.weight"].dtype)
        arch, params = load(GOLDEN / name)
        hf.save_params(tmp_path / name, arch, params, dtype=dtype)
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() == original.keys()
        for key, value in original.items():
            assert written[key].dtype == value.dtype
            np.testing.assert_array_equal(written[key], value)


def test_llama_biases_export_the_zero_bias_their_class_has(tmp_path):
    arch, params = load(GOLDEN / "llama_biases")
    hf.save_params(tmp_path / "out", arch, params)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not written["model.layers.1.self_attn.o_proj.bias"].any()


def test_files_are_cut_at_the_size_asked_and_indexed(tmp_path):
    arch, params = load(GOLDEN / "llama_linear")
    hf.save_params(tmp_path / "out", arch, params, dtype="float32", max_shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 2
    sizes = [sum(x.nbytes for x in load_file(tmp_path / "out" / f).values()) for f in files]
    assert max(sizes) <= 30_000 and sum(sizes) == index["metadata"]["total_size"]
    assert_same(load(tmp_path / "out")[1], params)


def test_tokenizer_files_and_ids_come_along(copied, tmp_path):
    source = copied("llama_tied")
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    generation = {"eos_token_id": [2, 5], "temperature": 0.6}
    (source / "generation_config.json").write_text(json.dumps(generation))
    arch, params = load(source)
    out = tmp_path / "out"
    hf.save_params(out, arch, params, source=source, token_ids={"pad_token_id": 7})
    ids = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 7}
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in ids} == ids
    assert json.loads((out / "generation_config.json").read_text()) == {**generation, **ids}
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (out / "modeling_evil.py").exists()


def test_an_export_is_whole_or_absent(tmp_path, monkeypatch):
    arch, params = load(GOLDEN / "llama_tied")
    monkeypatch.setattr(safetensors_io, "save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf.save_params(tmp_path / "out", arch, params)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="full exists and is not empty"):
        hf.save_params(tmp_path / "full", arch, params)
    (tmp_path / "empty").mkdir()
    hf.save_params(tmp_path / "empty", arch, params)
    assert (tmp_path / "empty" / "config.json").is_file()


def test_wrong_parameters_are_not_written(tmp_path):
    arch, params = load(GOLDEN / "llama_linear")
    with pytest.raises(ValueError, match=r"head/kernel is missing"):
        hf.save_params(tmp_path / "out", arch, {k: v for k, v in params.items() if k != "head"})
    params["final_norm"] = {"scale": jnp.ones(31)}
    with pytest.raises(ValueError, match=r"final_norm/scale is \[31\], not \[32\]"):
        hf.save_params(tmp_path / "out", arch, params)
    with pytest.raises(ValueError, match="float16"):
        hf.save_params(tmp_path / "out", arch, params, dtype="float16")


def test_score_bias_is_kept_and_optional(copied, tmp_path, caplog):
    arch, params = load(GOLDEN / "llama_scalar", "scalar")
    assert_same(params["head"]["bias"], jnp.zeros(1))  # transformers writes none
    params["head"]["bias"] = jnp.array([0.75])
    with caplog.at_level("WARNING", logger="absl"):
        hf.save_params(tmp_path / "out", arch, params, head="scalar", dtype="float32")
    assert "score.bias [0.75]" in caplog.text
    assert_same(load(tmp_path / "out", "scalar")[1], params)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert len(config["id2label"]) == 1


def test_the_trunk_alone_leaves_any_head_unread():
    for name in ("llama_linear", "llama_scalar"):
        _, trunk = load(GOLDEN / name, "none")
        assert set(trunk) == {"embed", "blocks", "final_norm"}
        _, params = load(GOLDEN / name, head_of(name))
        assert_same(trunk, {key: value for key, value in params.items() if key != "head"})


# ---------------------------------------------------------------- config.json


def test_old_and_new_rope_keys_mean_the_same(copied):
    for name in ("llama_tied", "llama_linear", "llama_llama3"):
        directory = copied(name)
        expected = hf.read_architecture(directory)
        rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
        theta = rope.pop("rope_theta")
        old = {"rope_theta": theta, "rope_parameters": "absent", "rope_scaling": rope}
        assert hf.read_architecture(edit_config(directory, **old)) == expected
        rope["type"] = rope.pop("rope_type")
        assert hf.read_architecture(edit_config(directory, rope_scaling=rope)) == expected
        if name == "llama_tied":
            assert hf.read_architecture(edit_config(directory, rope_scaling=None)) == expected


def test_absent_keys_take_the_classes_defaults(copied):
    gone = ("rope_parameters", "num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias")
    gone = dict.fromkeys((*gone, "tie_word_embeddings", "max_position_embeddings"), "absent")
    arch = hf.read_architecture(edit_config(copied("llama_llama3"), **gone))
    assert (arch.rope_theta, arch.rope_scaling, arch.norm_eps) == (10000.0, None, 1e-6)
    assert (arch.num_kv_heads, arch.head_dim, arch.max_position) == (4, 8, 2048)
    assert not arch.tie_embeddings and not arch.attention_bias
    assert hf.read_architecture(edit_config(copied("qwen2_tied"), **gone)).attention_bias


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling("linear", 2.5), RopeScaling("llama3", 8.0, 1.0, 4.0, 64)]
)
def test_written_configs_are_read_by_us_and_transformers(scaling, tmp_path):
    from transformers import AutoConfig

    arch = Architecture("qwen2", rope_theta=5e5, rope_scaling=scaling, attention_bias=True)
    config = hf_config.config_of(arch, head="lm", dtype="bfloat16", token_ids={"eos_token_id": 3})
    assert hf.architecture_of(config) == arch
    for form in (("rope_parameters",), ("rope_theta", "rope_scaling")):  # either one suffices
        assert hf.architecture_of({k: v for k, v in config.items() if k not in form}) == arch
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters["rope_theta"] == 5e5
    assert theirs.rope_parameters["rope_type"] == (scaling.kind if scaling else "default")
    assert (theirs.head_dim, theirs.eos_token_id) == (arch.head_dim, 3)
    assert hf.architecture_of(theirs.to_dict()) == arch


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'.*llama.*qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
    ],
)
def test_unsupported_configs_are_refused_by_key(changes, words, copied):
    with pytest.raises(ValueError, match=rf"config.json: .*{words}"):
        hf.read_architecture(edit_config(copied("llama_tied"), **changes))


# ---------------------------------------------------------------- tensors


def test_missing_unexpected_and_misshapen_tensors_are_named(copied):
    def spoil(tensors):
        tensors["model.layers.1.mlp.extra.weight"] = tensors.pop(
            "model.layers.1.mlp.up_proj.weight"
        )
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()

    directory = edit_tensors(copied("llama_tied"), spoil)
    with pytest.raises(ValueError) as caught:
        load(directory)
    for words in (
        "1 missing: model.layers.1.mlp.up_proj.weight",
        "1 unexpected: model.layers.1.mlp.extra.weight",
        "model.norm.weight is [31], not [32]",
    ):
        assert words in str(caught.value)


def test_a_head_that_is_not_there_is_never_made_up(copied):
    with pytest.raises(ValueError, match=r"missing: score.weight.*unexpected: lm_head.weight"):
        load(GOLDEN / "llama_linear", "scalar")
    with pytest.raises(ValueError, match=r"missing: lm_head.weight.*unexpected: score.weight"):
        load(GOLDEN / "llama_scalar", "lm")
    # Tied or not is the config's word, and two labels are no scalar.
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        load(edit_config(copied("llama_tied"), tie_word_embeddings=False))
    double = edit_tensors(
        copied("llama_scalar"), lambda t: t.update({"score.weight": np.zeros((2, 32), np.float32)})
    )
    with pytest.raises(ValueError, match=r"score.weight is \[2, 32\], not \[1, 32\]"):
        load(double, "scalar")


def test_harmless_extras_are_left_unread(copied):
    def extra(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    assert_same(load(edit_tensors(copied("llama_tied"), extra))[1], load(GOLDEN / "llama_tied")[1])


def test_output_projection_biases_must_be_zero(copied):
    directory = copied("llama_biases")
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.self_attn.o_proj.bias"
    tensors = load_file(directory / index[name])
    tensors[name][3] = 0.5
    save_file(tensors, directory / index[name])
    with pytest.raises(ValueError, match=rf"{name}.*not zero"):
        load(directory)


def test_float16_is_read_and_integers_are_refused(copied):
    def narrow(tensors):
        tensors.update({k: v.astype(np.float16) for k, v in tensors.items()})

    half = edit_tensors(copied("llama_tied"), narrow)
    expected = jax.tree.map(
        lambda x: x.astype(jnp.float16).astype(jnp.float32), load(GOLDEN / "llama_tied")[1]
    )
    assert_same(load(half)[1], expected)
    edit_tensors(half, lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}))
    with pytest.raises(ValueError, match=r"model.norm.weight.*I8"):
        load(half)


def test_broken_directories_are_named(copied, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere/config.json"):
        hf.read_architecture(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        hf.load_params(tmp_path / "nowhere", Architecture())
    pickled = copied("llama_tied")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin.*convert"):
        load(pickled)
    (pickled / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match=r"model.safetensors is no valid safetensors"):
        load(pickled)


def test_broken_indices_are_named(copied):
    directory = copied("llama_linear")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    good = dict(index["weight_map"])

    def with_map(**changes):
        path.write_text(json.dumps(index | {"weight_map": good | changes}))
        return directory

    with pytest.raises(ValueError, match=r"outside its directory.*evil"):
        load(with_map(**{"lm_head.weight": "../evil.safetensors"}))
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        load(with_map(**{"lm_head.weight": "gone.safetensors"}))
    with pytest.raises(ValueError, match=r"'ghost' is not in .*model-00001"):
        load(with_map(ghost="model-00001-of-00004.safetensors"))


# ---------------------------------------------------------------- shardings


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen2_tied", (8, 1, 1)),
        ("qwen2_tied", (2, 2, 2)),
        ("qwen2_tied", (1, 2, 4)),
        ("llama_scalar", (1, 2, 4)),
    ],
)
def test_loading_into_shardings_is_loading_then_sharding(name, shape, monkeypatch):
    monkeypatch.setattr(streaming, "PIECE_BYTES", 3000)  # several pieces a tensor
    head = head_of(name)
    arch, whole = load(GOLDEN / name, head)
    mesh = make_mesh(MeshConfig(*shape))
    shardings = parameter_specs(arch, hf.parameter_shapes(arch, head), mesh)
    _, cut = load(GOLDEN / name, head, shardings)
    expected = shard(whole, shardings)
    assert_same(cut, expected)
    for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert x.device == y.device and x.index == y.index
            np.testing.assert_array_equal(np.asarray(x.data), np.asarray(y.data))


def test_sharded_parameters_are_written_like_whole_ones(tmp_path):
    arch, whole = load(GOLDEN / "qwen2_tied")
    mesh = make_mesh(MeshConfig(1, 2, 4))
    hf.save_params(tmp_path / "whole", arch, whole)
    hf.save_params(tmp_path / "cut", arch, shard(whole, parameter_specs(arch, whole, mesh)))
    files = [(tmp_path / d / "model.safetensors").read_bytes() for d in ("whole", "cut")]
    assert files[0] == files[1]


def test_one_sharding_serves_all_and_none_is_uncommitted():
    device = jax.devices()[3]
    _, there = load(GOLDEN / "llama_tied", shardings=jax.sharding.SingleDeviceSharding(device))
    assert all(x.devices() == {device} for x in jax.tree.leaves(there))
    _, here = load(GOLDEN / "llama_tied")
    assert not any(x.committed for x in jax.tree.leaves(here))
    assert_same(here, there)
