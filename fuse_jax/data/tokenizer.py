"""Tokenizers from a local Hugging Face directory, and the little the rest of the system needs.

`transformers` takes seconds to import, so it is imported when a tokenizer is loaded and not before.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fuse_jax.data.records import DataError, TokenIds


class Vocabulary(Protocol):
    """What generation, scoring and sample tables ask of a tokenizer or of the built-in task."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that may be sampled; a model's larger table is padding beyond it."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response; several are usual. The first ends demonstrations."""
        ...

    @property
    def pad_token_id(self) -> int:
        """Id to fill up with. It may equal a stop id, so masks are made from lengths only."""
        ...

    def decode(self, tokens: TokenIds) -> str:
        """Readable text of token ids; special tokens are left out."""
        ...


class ChatRefused(Exception):
    """The chat template raised on a conversation (many refuse two turns of one role in a row)."""


class TextTokenizer:
    """A Hugging Face tokenizer with prompts built one way: one BOS at most, no EOS at the end."""

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int], pad_token_id: int | None):
        """`tokenizer` is transformers'; `load_tokenizer` finds the ids in a directory."""
        self.hf = tokenizer
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.stop_token_ids = tuple(int(i) for i in stop_token_ids)
        if not self.stop_token_ids:
            raise DataError(
                "the tokenizer has no stop token: set eos_token in tokenizer_config.json or "
                "eos_token_id in generation_config.json"
            )
        outside = [i for i in self.stop_token_ids if not 0 <= i < self.vocab_size]
        if outside:
            raise DataError(
                f"stop token ids {outside} are outside the vocabulary of {self.vocab_size} ids: "
                "config and tokenizer are of different models"
            )
        self.pad_token_id = self.stop_token_ids[0] if pad_token_id is None else int(pad_token_id)
        self._prefix = self._added_prefix()

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(getattr(self.hf, "chat_template", None))

    def _added_prefix(self) -> list[int]:
        """Ids the tokenizer itself puts before a text (BOS or none); what it appends is dropped."""
        probe = "a"
        plain = self.hf(probe, add_special_tokens=False).input_ids
        full = self.hf(probe, add_special_tokens=True).input_ids
        starts = range(len(full) - len(plain) + 1)
        at = next((i for i in starts if full[i : i + len(plain)] == plain), 0)
        return list(full[:at])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, nothing added. Special tokens spelt out in it become their ids."""
        texts = list(texts)
        # verbose=False: lengths are checked against our own limits, not the tokenizer's.
        return self.hf(texts, add_special_tokens=False, verbose=False).input_ids if texts else []

    def encode_prompts(self, texts: Sequence[str], *, templated: bool) -> list[list[int]]:
        """Prompt ids. Plain text gets what the tokenizer puts first; templated text already has it.

        Doubled leading BOS ids become one, and the EOS at the end is taken away: a prompt that
        ends in it tells the model that nothing is left to say. Other stop ids may stay there
        (Phi-3 lists its "<|assistant|>", with which prompts rightly end, as one).
        """
        prefix = [] if templated else self._prefix
        return [self._tidied(prefix + ids) for ids in self.encode(texts)]

    def _tidied(self, ids: list[int]) -> list[int]:
        bos, eos = self.hf.bos_token_id, self.hf.eos_token_id
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids = ids[1:]
        while eos is not None and ids and ids[-1] == eos and ids != [bos]:
            ids = ids[:-1]
        return ids

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        """Response ids, each ended by the first stop id (not doubled where the text has one)."""
        stop = self.stop_token_ids[0]
        return [
            ids if ids and ids[-1] in self.stop_token_ids else [*ids, stop]
            for ids in self.encode(texts)
        ]

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation as the chat template writes it, opened for the assistant's turn.

        Raises:
          ChatRefused: the template does not take this conversation.
        """
        import jinja2

        try:
            return self.hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise ChatRefused(str(error)) from error

    def decode(self, tokens: TokenIds) -> str:
        """Text of the ids, special tokens left out, blanks as they are."""
        return self.hf.decode(
            [int(t) for t in tokens],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )


def import_transformers() -> Any:
    """The transformers module, kept off the network and quiet about torch, which we do not use."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return importlib.import_module("transformers")


def load_tokenizer(directory: str | Path) -> TextTokenizer:
    """The tokenizer of a local Hugging Face directory; nothing is fetched, no remote code is run.

    Stop ids: the tokenizer's eos first (it ends a turn), then every `eos_token_id` of
    generation_config.json and config.json (chat models list several). Pad id: the tokenizer's,
    else the configs', else the first stop id.

    Raises:
      DataError: no such directory, no tokenizer in it, broken JSON, no stop token, or ids outside
        the vocabulary.
    """
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise DataError(f"no directory {path}: a tokenizer is loaded from a local directory only")
    if not any((path / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        raise DataError(
            f"{path} has neither tokenizer.json nor tokenizer_config.json: copy the tokenizer's "
            "files beside the weights"
        )
    transformers = import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds; the directory is what they lack
        raise DataError(f"{path}: transformers can't load this tokenizer: {error}") from error
    configs = [_read_config(path / n) for n in ("generation_config.json", "config.json")]
    stops = [tokenizer.eos_token_id, *(c.get("eos_token_id") for c in configs)]
    pads = [tokenizer.pad_token_id, *(c.get("pad_token_id") for c in configs)]
    return TextTokenizer(
        tokenizer,
        _unique_ids(stops),
        next((p for p in pads if isinstance(p, int) and p >= 0), None),
    )


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not JSON ({error})") from error
    return config if isinstance(config, dict) else {}


def _unique_ids(values: Sequence[Any]) -> list[int]:
    """Ids of entries that are an id, a list of ids or nothing, each once, in order."""
    flat = [i for v in values for i in (v if isinstance(v, list) else [v]) if i is not None]
    return list(dict.fromkeys(int(i) for i in flat))
