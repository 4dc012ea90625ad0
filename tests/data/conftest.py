"""A tiny byte-level BPE tokenizer directory, made on the spot."""

import json
from pathlib import Path

import pytest

TEXT = [
    "Human: what is a harmless question? Assistant: this one, I think, and the answer is here.",
    "There are 12 ducks and 7 eggs; how many are left for the market every day?",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(directory: Path, *, chat: bool, adds: str = "<s> $A </s>") -> Path:
    """Writes the tokenizer; `adds` is what encoding puts around a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    from fuse_jax.data.tokenizer import import_transformers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single=adds, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", bos_token="<s>", eos_token="</s>"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(directory))
    # A chat model's usual pair: the end of the text, and the end of a turn.
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 2, "vocab_size": 384}))
    return directory


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory):
    """Has a chat template that wants alternating roles; adds BOS and EOS to what it encodes."""
    from fuse_jax.data.tokenizer import load_tokenizer

    return load_tokenizer(build_tokenizer(tmp_path_factory.mktemp("chat"), chat=True))


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory):
    """The same without a chat template."""
    from fuse_jax.data.tokenizer import load_tokenizer

    return load_tokenizer(build_tokenizer(tmp_path_factory.mktemp("plain"), chat=False))


@pytest.fixture(scope="session")
def make_tokenizer():
    """`make_tokenizer(directory, chat=..., adds=...)` writes a variant."""
    return build_tokenizer
