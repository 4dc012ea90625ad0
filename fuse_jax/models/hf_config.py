"""config.json of a Hugging Face directory: read into an Architecture, and written back.

Read are the form of transformers 4 (`rope_theta`, `rope_scaling`) and that of 5
(`rope_parameters`); written is a file that both understand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuse_jax.models.architecture import FAMILIES, Architecture, RopeScaling
from fuse_jax.models.families import CLASSES

MAX_POSITION = {"llama": 2048, "qwen2": 32768}  # the classes' defaults where the key is absent
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys that change the computation, and the only value that means what is computed here.
ONLY: tuple[tuple[str, Any], ...] = (
    ("hidden_act", "silu"),
    ("mlp_bias", False),
    ("use_sliding_window", False),
    ("partial_rotary_factor", 1.0),
    ("quantization_config", None),
)


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json as it is. Raises FileNotFoundError naming the path."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give a local Hugging Face directory")
    return json.loads(path.read_text(encoding="utf-8"))


def read_architecture(directory: str | Path) -> Architecture:
    """The Architecture that config.json describes.

    Raises FileNotFoundError, or ValueError naming the file, the key and what is supported.
    """
    try:
        return architecture_of(read_config(directory))
    except ValueError as error:
        raise ValueError(f"{Path(directory) / 'config.json'}: {error}") from error


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The Architecture of a parsed config.json; ValueError as `read_architecture`."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r} is not supported: only {FAMILIES} are")
    for key, only in ONLY:
        if config.get(key, only) not in (only, None):
            raise ValueError(f"{key}={config[key]!r} is not supported: only {only!r} is")
    sliding = set(config.get("layer_types") or ()) - {"full_attention"}
    if sliding:
        raise ValueError(f"layer_types has {sorted(sliding)}: only 'full_attention' is supported")
    heads = _required(config, "num_attention_heads")
    hidden = _required(config, "hidden_size")
    theta, scaling = _rope(config)
    return Architecture(
        family=family,
        vocab_size=_required(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_required(config, "intermediate_size"),
        num_layers=_required(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
        max_position=config.get("max_position_embeddings") or MAX_POSITION[family],
    )


def _required(config: Mapping[str, Any], key: str) -> int:
    if key not in config:
        raise ValueError(f"{key} is missing")
    return config[key]


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope_parameters per layer type are not supported: {sorted(rope)}")
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    # 'type' was the key until 2024; where both are there they agree.
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _rope_number(rope, "factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=_rope_number(rope, "factor"),
            low_freq_factor=_rope_number(rope, "low_freq_factor"),
            high_freq_factor=_rope_number(rope, "high_freq_factor"),
            original_max_position=int(_rope_number(rope, "original_max_position_embeddings")),
        )
    raise ValueError(f"rope type {kind!r} is not supported: only default, linear and llama3 are")


def _rope_number(rope: Mapping[str, Any], key: str) -> float:
    if key not in rope:
        raise ValueError(f"the rope parameters {dict(rope)} lack {key!r}")
    return float(rope[key])


def config_of(
    arch: Architecture, *, head: str, dtype: str, token_ids: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of `arch` as a dict that transformers 4 and 5 both read.

    head: 'lm' or 'scalar' (one label). dtype: of the weights beside it. token_ids: `bos_token_id`,
    `eos_token_id` (one or several), `pad_token_id`, as far as known.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    if arch.rope_scaling is not None:
        rope = {"rope_type": arch.rope_scaling.kind, "factor": arch.rope_scaling.factor}
    if arch.rope_scaling is not None and arch.rope_scaling.kind == "llama3":
        rope["low_freq_factor"] = arch.rope_scaling.low_freq_factor
        rope["high_freq_factor"] = arch.rope_scaling.high_freq_factor
        rope["original_max_position_embeddings"] = arch.rope_scaling.original_max_position
    config: dict[str, Any] = {
        "architectures": [CLASSES[arch.family][head]],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": arch.max_position,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_scaling": None if arch.rope_scaling is None else rope,
        "rope_parameters": {"rope_theta": arch.rope_theta, **rope},
        "tie_word_embeddings": arch.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        **{key: token_ids[key] for key in TOKEN_KEYS if key in token_ids},
    }
    if arch.family == "llama":
        config["attention_bias"] = arch.attention_bias
        config["mlp_bias"] = False
    else:
        config["use_sliding_window"] = False
    if head == "scalar":
        config["id2label"] = {"0": "LABEL_0"}
        config["label2id"] = {"LABEL_0": 0}
    return config
