"""What a decoder-only transformer looks like: sizes and conventions, nothing that runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "qwen2"]
FAMILIES: tuple[str, ...] = ("llama", "qwen2")
POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides every frequency by `factor` (arXiv 2306.15595); `llama3` divides the low ones,
    keeps the high ones and blends in between (Llama 3.1 release).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Architecture:
    """Sizes of one model. `vocab_size` counts embedding rows, padding rows included."""

    family: Family = "llama"
    vocab_size: int = 32000
    hidden_size: int = 64
    intermediate_size: int = 168
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    max_position: int = 2048

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r} is not supported: use one of {FAMILIES}")
        for name in POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}: every key/value head serves the same number of "
                "query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs")


def parameter_count(arch: Architecture, *, scalar_head: bool = False) -> int:
    """Number of parameters, embedding and head included."""
    d, q, kv = (
        arch.hidden_size,
        arch.num_heads * arch.head_dim,
        arch.num_kv_heads * arch.head_dim,
    )
    bias = (q + 2 * kv) if arch.attention_bias else 0
    block = d * (q + 2 * kv) + bias + q * d + 3 * d * arch.intermediate_size + 2 * d
    head = d + 1 if scalar_head else (0 if arch.tie_embeddings else d * arch.vocab_size)
    return arch.vocab_size * d + arch.num_layers * block + d + head
