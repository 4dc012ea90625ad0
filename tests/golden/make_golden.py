"""Makes the golden directories beside this file, once, with torch transformers.

    pip install torch transformers && python tests/golden/make_golden.py

Tiny random llama and qwen2 models as transformers saves them, and in `expected.npz` the tokens
given to them and the float32 logits they gave. Weights, biases and norms are all random, so that a
swapped or forgotten tensor shows.
"""

import pathlib
import shutil

import numpy as np
import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

HERE = pathlib.Path(__file__).resolve().parent
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
# The original context is short, so that all three regimes of frequencies occur.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
MODELS = {
    "llama_tied": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=PLAIN),
        "float32",
    ),
    "llama_linear": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES | {"num_key_value_heads": 4}, rope_parameters=LINEAR),
        "float32",
    ),
    "llama_llama3": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, head_dim=16, rms_norm_eps=1e-5, rope_parameters=LLAMA3),
        "bfloat16",
    ),
    "llama_biases": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, attention_bias=True, rope_parameters=PLAIN),
        "float32",
    ),
    "qwen2_tied": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, tie_word_embeddings=True, rope_parameters=PLAIN),
        "bfloat16",
    ),
    "qwen2_untied": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES | {"num_key_value_heads": 1}, rope_parameters=PLAIN),
        "float32",
    ),
    "llama_scalar": (
        LlamaForSequenceClassification,
        LlamaConfig(**SIZES, num_labels=1, rope_parameters=PLAIN),
        "float32",
    ),
    "qwen2_scalar": (
        Qwen2ForSequenceClassification,
        Qwen2Config(**SIZES, num_labels=1, rope_parameters=PLAIN),
        "float32",
    ),
}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data = 1 + 0.2 * noise
        elif name.endswith("o_proj.bias"):
            parameter.data = 0 * noise  # fuse_jax has no bias there, and reads only zeros
        elif name.endswith("bias"):
            parameter.data = 0.3 * noise
        elif "embed_tokens" in name:
            parameter.data = 0.5 * noise
        else:
            parameter.data = noise / parameter.shape[-1] ** 0.5


@torch.no_grad()
def make(name: str, seed: int) -> None:
    cls, config, dtype = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    model = cls(config).eval()
    randomise(model, generator)
    model = model.to(getattr(torch, dtype))
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    # One in two in several files.
    model.save_pretrained(target, max_shard_size="30KB" if seed % 2 else "5GB")
    # Loaded anew: to(bfloat16) has rounded the rotary frequencies too.
    model = cls.from_pretrained(target, dtype=torch.float32).eval()
    tokens = torch.randint(3, config.vocab_size, (2, 40), generator=generator)
    if "scalar" in name:
        # The class pools the last token; its head at every position says more.
        logits = model.score(model.model(tokens).last_hidden_state)[..., 0]
        pooled = model(tokens).logits[:, 0]
        assert torch.allclose(pooled, logits[:, -1])
    else:
        logits = model(tokens).logits
    np.savez_compressed(
        target / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy()
    )


if __name__ == "__main__":
    print("torch", torch.__version__, "transformers", transformers.__version__)
    for number, model_name in enumerate(MODELS):
        make(model_name, number)
        size = sum(f.stat().st_size for f in (HERE / model_name).iterdir())
        print(
            f"{model_name:16s} {size / 1000:6.0f} kB",
            sorted(p.name for p in (HERE / model_name).iterdir()),
        )
