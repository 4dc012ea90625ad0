"""Prompts, preference pairs and demonstrations from files: read, rendered, tokenised, filtered.

Every row ends up kept, dropped under a name, or in an error that names its file and line; the
counts are printed and returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from fuse_jax.data.files import read_rows
from fuse_jax.data.records import (
    DataError,
    Demonstration,
    Filtered,
    Preference,
    Prompt,
    token_array,
)
from fuse_jax.data.rows import Example, NoisyRow, parse_row
from fuse_jax.data.tokenizer import ChatRefused, TextTokenizer

Paths = str | Path | Iterable[str | Path]
LongResponses = Literal["drop", "truncate"]
Record = TypeVar("Record", Prompt, Preference, Demonstration)
# Rows tokenised at once: the tokenizer works on them in parallel, and memory stays small.
_CHUNK = 512


def load_prompts(
    paths: Paths,
    tokenizer: TextTokenizer,
    *,
    max_prompt_tokens: int,
    chat: bool | None = None,
    limit: int | None = None,
    log: Callable[[str], None] = print,
) -> tuple[list[Prompt], Filtered]:
    """Prompts to generate from; of pairs and demonstrations, the prompt side.

    Args:
      paths: file, directory, glob, or several (`files.find_files`).
      max_prompt_tokens: longer prompts are dropped and counted.
      chat: True renders the chat template, False takes the text as it is, None renders it where
        the tokenizer has one.
      limit: stop after this many kept prompts.
      log: takes the one-line account.

    Raises:
      DataError: a malformed row (file and line), no template where one is needed, or nothing kept.
    """

    def finish(row: _Tokenised) -> tuple[Prompt, bool]:
        return Prompt(row.index, token_array(row.prompt), row.text, row.example.meta), False

    return _load("prompts", paths, tokenizer, max_prompt_tokens, chat, limit, log, finish)


def load_preferences(
    paths: Paths,
    tokenizer: TextTokenizer,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    long_responses: LongResponses = "drop",
    chat: bool | None = None,
    limit: int | None = None,
    log: Callable[[str], None] = print,
) -> tuple[list[Preference], Filtered]:
    """Pairs of answers for the reward model; both responses end in a stop id and are never equal.

    A response longer than `max_response_tokens` drops its pair, or with "truncate" loses its end
    (its stop id too); both are counted. Pairs with different prompts, an empty or equal answers
    are dropped and counted. Other arguments and errors as in `load_prompts`.
    """
    cut = _cutter(max_response_tokens, long_responses)

    def finish(row: _Tokenised) -> tuple[Preference, bool]:
        example = row.example
        if example.chosen is None or example.rejected is None:
            raise DataError(f"{example.where}: no 'chosen' and 'rejected' here: not a pair")
        if not example.chosen.strip() or not example.rejected.strip():
            raise NoisyRow("pair with an empty answer")
        if row.chosen == row.rejected:
            raise NoisyRow("pair with equal answers")
        chosen, rejected = cut(row.chosen), cut(row.rejected)
        if chosen == rejected:
            raise NoisyRow("pair with answers equal once cut")
        pair = Preference(
            token_array(row.prompt), token_array(chosen), token_array(rejected), example.margin
        )
        return pair, (chosen, rejected) != (row.chosen, row.rejected)

    changed = f"pair cut to the first {max_response_tokens} tokens"
    return _load(
        "preferences", paths, tokenizer, max_prompt_tokens, chat, limit, log, finish, changed
    )


def load_demonstrations(
    paths: Paths,
    tokenizer: TextTokenizer,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    long_responses: LongResponses = "drop",
    chat: bool | None = None,
    limit: int | None = None,
    log: Callable[[str], None] = print,
) -> tuple[list[Demonstration], Filtered]:
    """Answers to imitate; of pairs, the chosen one. Otherwise as `load_preferences`."""
    cut = _cutter(max_response_tokens, long_responses)

    def finish(row: _Tokenised) -> tuple[Demonstration, bool]:
        of_pair = row.example.chosen is not None
        text = row.example.chosen if of_pair else row.example.response
        if text is None:
            raise DataError(f"{row.example.where}: no answer to imitate in this row")
        if not text.strip():
            raise NoisyRow("empty answer")
        whole = row.chosen if of_pair else row.response
        response = cut(whole)
        return Demonstration(token_array(row.prompt), token_array(response)), response != whole

    changed = f"response cut to its first {max_response_tokens} tokens"
    return _load(
        "demonstrations", paths, tokenizer, max_prompt_tokens, chat, limit, log, finish, changed
    )


class _Tokenised(NamedTuple):
    """A row with its ids; an answer it does not have is an empty list."""

    index: int
    example: Example
    text: str
    prompt: list[int]
    response: list[int]
    chosen: list[int]
    rejected: list[int]


def _cutter(max_tokens: int, long_responses: LongResponses) -> Callable[[list[int]], list[int]]:
    """What is done to a response longer than the limit: cut, or its row dropped."""
    if long_responses not in ("drop", "truncate"):
        raise DataError(f"long_responses must be 'drop' or 'truncate', got {long_responses!r}")
    if max_tokens < 1:
        raise DataError(f"max_response_tokens must be at least 1, got {max_tokens}")

    def cut(tokens: list[int]) -> list[int]:
        if len(tokens) > max_tokens and long_responses == "drop":
            raise NoisyRow(f"response longer than {max_tokens} tokens")
        return tokens[:max_tokens]

    return cut


def _load(
    what: str,
    paths: Paths,
    tokenizer: TextTokenizer,
    max_prompt_tokens: int,
    chat: bool | None,
    limit: int | None,
    log: Callable[[str], None],
    finish: Callable[[_Tokenised], tuple[Record, bool]],
    changed: str = "",
) -> tuple[list[Record], Filtered]:
    """`finish` makes the record and says whether it had to be changed (counted as `changed`)."""
    if max_prompt_tokens < 1:
        raise DataError(f"max_prompt_tokens must be at least 1, got {max_prompt_tokens}")
    if limit is not None and limit < 1:
        raise DataError(f"limit must be at least 1 or None (all rows), got {limit}")
    if chat and not tokenizer.has_chat_template:
        raise DataError("chat=True, but the tokenizer has no chat template: set chat=False")
    templated = tokenizer.has_chat_template if chat is None else chat
    counts, records = Filtered(what), []
    for row in _tokenised(paths, tokenizer, templated, counts):
        counts.rows += 1
        try:
            if not row.prompt:
                raise NoisyRow("empty prompt")
            if len(row.prompt) > max_prompt_tokens:
                raise NoisyRow(f"prompt longer than {max_prompt_tokens} tokens")
            record, was_changed = finish(row)
        except NoisyRow as noisy:
            counts.dropped[str(noisy)] += 1
            continue
        records.append(record)
        counts.kept += 1
        counts.changed.update([changed] * was_changed)
        if counts.kept == limit:
            counts.stopped_early = True
            break
    log(str(counts))
    if not records:
        raise DataError(f"nothing left of {paths}: {counts}; raise the limits or check the data")
    return records, counts


def _tokenised(
    paths: Paths, tokenizer: TextTokenizer, templated: bool, counts: Filtered
) -> Iterator[_Tokenised]:
    """Usable rows with their ids, tokenised a chunk at a time."""
    rendered = _rendered(paths, tokenizer, templated, counts)
    while chunk := list(itertools.islice(rendered, _CHUNK)):
        prompts = tokenizer.encode_prompts([text for _, _, text in chunk], templated=templated)
        answers = (
            _encode_present(tokenizer, [getattr(e, name) for _, e, _ in chunk], templated)
            for name in ("response", "chosen", "rejected")
        )
        for head, *ids in zip(chunk, prompts, *answers):
            yield _Tokenised(*head, *ids)


def _encode_present(
    tokenizer: TextTokenizer, texts: list[str | None], templated: bool
) -> list[list[int]]:
    present = [text.strip() if templated else text for text in texts if text is not None]
    encoded = iter(tokenizer.encode_responses(present))
    return [[] if text is None else next(encoded) for text in texts]


def _rendered(
    paths: Paths, tokenizer: TextTokenizer, templated: bool, counts: Filtered
) -> Iterator[tuple[int, Example, str]]:
    """(row number, example, prompt text) of usable rows; noisy ones are counted as dropped."""
    for index, row in enumerate(read_rows(paths)):
        try:
            example = parse_row(row)
            if templated:
                text = tokenizer.render_chat(example.messages)
            elif example.plain is not None:
                text = example.plain
            else:
                raise DataError(
                    f"{row.where}: messages need a chat template: use a tokenizer that has one, "
                    "or give a 'prompt' string"
                )
        except NoisyRow as noisy:
            reason = str(noisy)
        except ChatRefused as refused:
            reason = f"conversation refused by the chat template ({refused})"
        else:
            yield index, example, text
            continue
        counts.rows += 1
        counts.dropped[reason] += 1
