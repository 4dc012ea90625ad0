"""How each parameter is called, and lies, in the Hugging Face layout of llama and qwen2.

A kernel of ours is `[in, out]`, theirs `[out, in]`; ours are stacked over layers, theirs are not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax

from fuse_jax.models import transformer
from fuse_jax.models.architecture import Architecture

Head = Literal["lm", "scalar", "none"]

# Path of ours -> their name. qwen2 differs from llama only in that its query, key and value
# projections always have biases.
NAMES: dict[str, str] = {
    "embed/embedding": "model.embed_tokens.weight",
    "blocks/attention_norm/scale": "model.layers.{}.input_layernorm.weight",
    "blocks/query/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "blocks/query/bias": "model.layers.{}.self_attn.q_proj.bias",
    "blocks/key/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "blocks/key/bias": "model.layers.{}.self_attn.k_proj.bias",
    "blocks/value/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "blocks/value/bias": "model.layers.{}.self_attn.v_proj.bias",
    "blocks/attention_out/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "blocks/mlp_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "blocks/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "blocks/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "blocks/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "final_norm/scale": "model.norm.weight",
}
HEAD_NAMES: dict[str, dict[str, str]] = {
    "lm": {"head/kernel": "lm_head.weight"},
    # ...ForSequenceClassification with one label has no bias: ours is beside it.
    "scalar": {"head/kernel": "score.weight", "head/bias": "score.bias"},
    "none": {},
}
OPTIONAL = ("score.bias",)  # 0 where absent
CLASSES: dict[str, dict[str, str]] = {
    "llama": {"lm": "LlamaForCausalLM", "scalar": "LlamaForSequenceClassification"},
    "qwen2": {"lm": "Qwen2ForCausalLM", "scalar": "Qwen2ForSequenceClassification"},
}


@dataclass(frozen=True)
class Leaf:
    """One parameter: its path and shape here, its names there (one a layer if stacked)."""

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool
    transposed: bool

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of each of the tensors in the Hugging Face layout."""
        one = self.shape[1:] if self.stacked else self.shape
        return one[::-1] if self.transposed else one


def parameter_shapes(arch: Architecture, head: Head = "lm") -> Any:
    """Tree of ShapeDtypeStruct (float32) of the parameters; nothing is computed.

    head: 'lm', 'scalar' (one number a position) or 'none' (the trunk alone).
    """
    kind = "lm" if head == "none" else head
    shapes = jax.eval_shape(lambda: transformer.init(arch, jax.random.key(0), head=kind))
    if head == "none":
        shapes.pop("head", None)
    return shapes


@functools.lru_cache(maxsize=64)
def leaves(arch: Architecture, head: Head) -> dict[str, Leaf]:
    """Every parameter of `arch`, keyed by its '/'-joined path."""
    if arch.family == "qwen2" and not arch.attention_bias:
        raise ValueError(
            "family='qwen2' always has attention biases in the Hugging Face layout: set "
            "attention_bias=True, or family='llama'"
        )
    names = NAMES | HEAD_NAMES[head]
    flat, _ = jax.tree_util.tree_flatten_with_path(parameter_shapes(arch, head))
    found = {}
    for keys, leaf in flat:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        stacked = path.startswith("blocks/")
        layers = range(arch.num_layers) if stacked else (0,)
        each = tuple(names[path].format(layer) for layer in layers)
        found[path] = Leaf(path, leaf.shape, each, stacked, path.endswith("kernel"))
    return found


def zero_biases(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Tensors their class has and ours has not, with shapes: they must be zero, and are written so.

    llama's `attention_bias` also gives the output projection one; ours has none there.
    """
    if arch.family != "llama" or not arch.attention_bias:
        return {}
    name = "model.layers.{}.self_attn.o_proj.bias"
    return {name.format(layer): (arch.hidden_size,) for layer in range(arch.num_layers)}
