"""A Hugging Face directory in and out, streamed.

Reading fills the target's shards piece by piece (`streaming.py`), so the host holds them and a few
small pieces, never a whole model twice. Nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import logging
from jax import Array
from jax.sharding import Sharding

from fuse_jax.models import families, safetensors_io, streaming
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.families import Head, Leaf, parameter_shapes
from fuse_jax.models.hf_config import (
    TOKEN_KEYS,
    architecture_of,
    config_of,
    read_architecture,
    read_config,
)
from fuse_jax.models.safetensors_io import Planned, Stored
from fuse_jax.models.transformer import Params

__all__ = ["architecture_of", "load_params", "parameter_shapes", "read_architecture", "save_params"]

WRITTEN = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# What makes up a tokenizer, if it is there. Weights and code are never copied.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def load_params(
    directory: str | Path,
    arch: Architecture,
    shardings: Any = None,
    *,
    head: Head = "lm",
    dtype: Any = jnp.float32,
) -> Params:
    """Parameters of `arch` from `directory`, in `dtype`, each shard filled where it shall lie.

    shardings: tree of Sharding like `parameter_shapes(arch, head)` (see
    `placement.sharding.parameter_specs`), one Sharding for all, or None: the default device,
    uncommitted. head: 'lm'; 'scalar' (`score.weight` `[1, D]`, `score.bias` taken as 0 if absent);
    'none' leaves the heads of the directory unread.

    Host memory: the shards this process holds, and a few pieces of `streaming.PIECE_BYTES`.

    Raises FileNotFoundError without safetensors, ValueError naming every tensor that is missing,
    unexpected, misshapen or of another dtype than bfloat16, float16 or float32.
    """
    stored = safetensors_io.find_tensors(directory)
    wanted = families.leaves(arch, head)
    _check_tensors(Path(directory), stored, wanted, arch, head)
    shapes = parameter_shapes(arch, head)
    one_for_all = shardings is None or isinstance(shardings, Sharding)

    def fill(keys: Any, _: Any, sharding: Sharding | None = None) -> Array:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        sharding = shardings if one_for_all else sharding
        return streaming.fill(stored, wanted[path], sharding, dtype)

    trees = (shapes,) if one_for_all else (shapes, shardings)
    return jax.tree_util.tree_map_with_path(fill, *trees)


def _check_tensors(
    directory: Path,
    stored: Mapping[str, Stored],
    wanted: Mapping[str, Leaf],
    arch: Architecture,
    head: Head,
) -> None:
    shapes = {name: leaf.hf_shape for leaf in wanted.values() for name in leaf.names}
    zero = families.zero_biases(arch)
    missing = [n for n in shapes if n not in stored and n not in families.OPTIONAL]
    ignored = [n for n in stored if n not in shapes and n not in zero and _harmless(n, arch, head)]
    known = {*shapes, *zero, *ignored}
    unexpected = [n for n in stored if n not in known]
    misshapen = [
        f"{n} is {list(stored[n].shape)}, not {list(shape)}"
        for n, shape in (shapes | zero).items()
        if n in stored and stored[n].shape != shape
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
        for what, names in [
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
        ]
        if names
    ]
    if problems:
        raise ValueError(
            f"the tensors of {directory} are not those of its config.json with head={head!r}: "
            + "; ".join(problems)
        )
    if ignored:
        logging.info("%s: %d tensors not needed: %s", directory, len(ignored), ", ".join(ignored))
    for name in zero:
        whole = tuple((0, size) for size in zero[name])
        if name in stored and np.any(safetensors_io.read(stored[name], name, whole)):
            raise ValueError(
                f"tensor {name!r} in {stored[name].file} is not zero: a bias of the output "
                "projection is not supported"
            )


def _harmless(name: str, arch: Architecture, head: Head) -> bool:
    if name.endswith("rotary_emb.inv_freq"):  # a constant that old llama checkpoints carry
        return True
    if head == "none":
        return not name.startswith("model.")
    return head == "lm" and arch.tie_embeddings and name == "lm_head.weight"


def save_params(
    directory: str | Path,
    arch: Architecture,
    params: Params,
    *,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    head: Literal["lm", "scalar"] = "lm",
    max_shard_bytes: int = 4 << 30,
    source: str | Path | None = None,
    token_ids: Mapping[str, int | list[int]] | None = None,
) -> None:
    """Write `params` as a Hugging Face directory that transformers 4 and 5 read.

    config.json, safetensors (an index if over `max_shard_bytes`), generation_config.json; tokenizer
    files, generation settings and token ids come from the directory `source` if given. token_ids:
    `bos_token_id`, `eos_token_id`, `pad_token_id`, over those of `source`. A scalar head becomes
    `...ForSequenceClassification` with one label, plus `score.bias`, which transformers ignores.

    The directory appears whole or not at all. Raises FileExistsError if it is there and not empty,
    ValueError for parameters that are not those of `arch`, or are partly on other hosts.
    """
    if dtype not in WRITTEN:
        raise ValueError(f"dtype={dtype!r}: weights are written in {tuple(WRITTEN)}")
    tensors = _plan(arch, params, head, WRITTEN[dtype])
    generation, ids = _token_ids(source, token_ids or {})
    config = config_of(arch, head=head, dtype=dtype, token_ids=ids)
    if head == "scalar" and np.any(np.asarray(params["head"]["bias"])):
        logging.warning(
            "%s: score.bias %s is written, but transformers' class has none and ignores it: its "
            "scores differ by that constant",
            directory,
            np.asarray(params["head"]["bias"]),
        )
    with safetensors_io.new_directory(directory) as made:
        safetensors_io.write(made, tensors, max_shard_bytes)
        safetensors_io.write_json(made / "config.json", config)
        safetensors_io.write_json(made / "generation_config.json", {**generation, **ids})
        for name in TOKENIZER_FILES if source is not None else ():
            if (Path(source or "") / name).is_file():
                shutil.copyfile(Path(source or "") / name, made / name)


def _token_ids(
    source: str | Path | None, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Generation settings of `source`, and the token ids that hold."""
    generation: dict[str, Any] = {}
    config: dict[str, Any] = {}
    if source is not None:
        config = read_config(source)
        path = Path(source) / "generation_config.json"
        if path.is_file():
            generation = safetensors_io.read_json(path)
    # generation_config.json knows all stop ids; config.json often only one of them.
    ids = {**config, **generation, **given}
    return generation, {key: ids[key] for key in TOKEN_KEYS if ids.get(key) is not None}


def _plan(arch: Architecture, params: Params, head: Head, dtype: np.dtype) -> list[Planned]:
    wanted = families.leaves(arch, head)
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    have = {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in flat}
    _check_params(have, wanted, head)
    planned = []
    for path, leaf in wanted.items():
        for layer, name in enumerate(leaf.names):
            make = _maker(have[path], leaf, layer, dtype)
            planned.append(Planned(name, math.prod(leaf.hf_shape) * dtype.itemsize, make))
    for name, shape in families.zero_biases(arch).items():
        size = math.prod(shape) * dtype.itemsize
        planned.append(Planned(name, size, functools.partial(np.zeros, shape, dtype)))
    return sorted(planned, key=lambda tensor: _place(tensor.name))


def _place(name: str) -> int:
    """Embedding, layer by layer, norm, head: neighbours in a model are neighbours in its files."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer:
        return int(layer[1])
    ends = {
        families.NAMES["embed/embedding"]: -1,
        families.NAMES["final_norm/scale"]: sys.maxsize - 1,
    }
    return ends.get(name, sys.maxsize)


def _check_params(have: Mapping[str, Any], wanted: Mapping[str, Leaf], head: Head) -> None:
    wrong = [f"{path} is missing" for path in wanted if path not in have]
    wrong += [f"{path} is unexpected" for path in have if path not in wanted]
    wrong += [
        f"{path} is {list(have[path].shape)}, not {list(leaf.shape)}"
        for path, leaf in wanted.items()
        if path in have and have[path].shape != leaf.shape
    ]
    if wrong:
        raise ValueError(
            f"the parameters are not the architecture's with head={head!r}: " + "; ".join(wrong)
        )
    for path, leaf in have.items():
        if isinstance(leaf, Array) and not leaf.is_fully_addressable:
            raise ValueError(f"{path} is partly on other hosts: gather the parameters, then save")


def _maker(value: Any, leaf: Leaf, layer: int, dtype: np.dtype) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        one = _take(value, layer, stacked=leaf.stacked, transposed=leaf.transposed, dtype=dtype)
        return np.ascontiguousarray(one)

    return make


@functools.partial(jax.jit, static_argnames=("stacked", "transposed", "dtype"))
def _take(value: Array, layer: int, *, stacked: bool, transposed: bool, dtype: Any) -> Array:
    """One layer of a parameter in their layout and `dtype`."""
    if stacked:
        value = jax.lax.dynamic_index_in_dim(value, layer, keepdims=False)
    return (value.T if transposed else value).astype(dtype)
