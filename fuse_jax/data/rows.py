"""From a row's fields to a conversation and its answers, still as text.

Layouts recognised, tried in this order (other fields of the row become `meta`):

* `chosen`, `rejected` strings without `prompt`: HH-RLHF transcripts, turns opened by "Human:" and
  "Assistant:"; the prompt is all up to the last "Assistant:" and must be the same on both sides
* `prompt`, `chosen`, `rejected`: strings, or lists of messages; optional `margin`
* `messages`: list of {role, content}; a last assistant turn is the answer to imitate
* `prompt`: a string or a list of messages; optional `response` or `completion` to imitate
* `question`, optional `answer` (GSM8K): the answer is imitated, and is in `meta` for rule rewards
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from fuse_jax.data.files import Row
from fuse_jax.data.records import DataError

Message = dict[str, str]
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
LAYOUTS = (
    "'chosen'+'rejected' (HH-RLHF transcripts), 'prompt'+'chosen'+'rejected', 'messages', "
    "'prompt' [+'response'], 'question' [+'answer']"
)


class NoisyRow(Exception):
    """A row that is well formed but of no use, as public data has them; counted, not fatal."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One row as text. `plain` is the prompt without a chat template (None: it needs one).

    Answers are as they follow `plain`; behind a chat template they are stripped of outer blanks.
    """

    where: str
    messages: tuple[Message, ...]
    plain: str | None
    meta: dict[str, Any]
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    margin: float = 0.0


def parse_row(row: Row) -> Example:
    """The row as an Example.

    Raises:
      DataError: no known layout, or a field of the wrong kind; names file, line and field.
      NoisyRow: the two sides of a pair have different prompts, or a transcript ends unanswered.
    """
    fields = row.fields
    if "chosen" in fields or "rejected" in fields:
        return _pair(row)
    if "messages" in fields:
        return _conversation(row, "messages", meta=_rest(fields, "messages", "prompt"))
    if isinstance(fields.get("prompt"), list):
        return _conversation(row, "prompt", meta=_rest(fields, "prompt"))
    if "prompt" in fields:
        prompt = _text(row, "prompt")
        return Example(
            row.where, (_user(prompt),), prompt, _rest(fields, "prompt"), response=_imitated(row)
        )
    if "question" in fields:
        question = _text(row, "question")
        answer = " " + _text(row, "answer").strip() if "answer" in fields else None
        plain = f"Question: {question.strip()}\nAnswer:"
        meta = _rest(fields, "question")
        return Example(row.where, (_user(question.strip()),), plain, meta, response=answer)
    raise DataError(f"{row.where}: fields {sorted(fields)} match no known layout: {LAYOUTS}")


def split_transcript(text: str, where: str) -> tuple[str, str]:
    """An HH-RLHF transcript as (prompt up to and with the last "Assistant:", answer)."""
    prompt, mark, answer = text.rpartition("\n\nAssistant:")
    if not mark or not prompt.startswith("\n\nHuman:"):
        raise DataError(
            f"{where}: not an HH-RLHF transcript (it must start with '\\n\\nHuman:' and have a "
            "'\\n\\nAssistant:' turn); give single answers a 'prompt' field beside them"
        )
    if _TURN.search(answer):
        raise NoisyRow("transcript without a last answer")
    return prompt + mark, answer


def transcript_messages(prompt: str) -> tuple[Message, ...]:
    """The turns of a transcript's prompt; the open "Assistant:" at its end is no turn."""
    parts = _TURN.split(prompt)[1:-2]
    return tuple(
        {"role": _ROLES[role], "content": content.strip()}
        for role, content in zip(parts[::2], parts[1::2])
    )


def _pair(row: Row) -> Example:
    fields = row.fields
    for name in ("chosen", "rejected"):
        if name not in fields:
            raise DataError(f"{row.where}: a pair needs 'chosen' and 'rejected'; no '{name}' here")
    rest = _rest(fields, "prompt", "messages", "chosen", "rejected", "margin")
    margin = _margin(row)
    if isinstance(fields["chosen"], list):
        messages, chosen = _answered(row, "chosen")
        others, rejected = _answered(row, "rejected")
        if messages != others:
            raise NoisyRow("pair with different prompts")
        plain = None
    else:
        chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
        if "prompt" in fields and isinstance(fields["prompt"], list):
            messages, plain = _messages(row, "prompt"), None
        elif "prompt" in fields:
            plain = _text(row, "prompt")
            messages = (_user(plain),)
        else:
            plain, chosen = split_transcript(chosen, row.where)
            other, rejected = split_transcript(rejected, row.where)
            if plain != other:
                raise NoisyRow("pair with different prompts")
            messages = transcript_messages(plain)
    return Example(row.where, messages, plain, rest, None, chosen, rejected, margin=margin)


def _answered(row: Row, name: str) -> tuple[tuple[Message, ...], str]:
    """A side of a pair given as messages: the turns before its last one, and that one's content."""
    messages = _messages(row, name)
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{row.where}: the last message of '{name}' must be the assistant's")
    if len(messages) == 1:  # only the answer stands here, the conversation is in 'prompt'
        if isinstance(row.fields.get("prompt"), list):
            messages = _messages(row, "prompt") + messages
        else:
            messages = (_user(_text(row, "prompt")), *messages)
    return messages[:-1], messages[-1]["content"]


def _conversation(row: Row, name: str, meta: dict[str, Any]) -> Example:
    messages, response = _messages(row, name), _imitated(row)
    if response is None and messages[-1]["role"] == "assistant":
        messages, response = messages[:-1], messages[-1]["content"]
        if not messages:
            raise DataError(f"{row.where}: '{name}' has an answer and nothing it answers")
    return Example(row.where, messages, None, meta, response=response)


def _messages(row: Row, name: str) -> tuple[Message, ...]:
    messages = row.fields[name]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{row.where}: '{name}' must be a list of at least one message")
    for message in messages:
        known = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not known:
            raise DataError(
                f"{row.where}: each message of '{name}' needs 'role' and 'content' strings, "
                f"got {str(message)[:80]!r}"
            )
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)


def _text(row: Row, name: str) -> str:
    value = row.fields.get(name)
    if not isinstance(value, str):
        raise DataError(f"{row.where}: '{name}' must be a string, got {str(value)[:80]!r}")
    return value


def _imitated(row: Row) -> str | None:
    return next((_text(row, n) for n in ("response", "completion") if n in row.fields), None)


def _margin(row: Row) -> float:
    value = row.fields.get("margin")
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
        raise DataError(f"{row.where}: 'margin' must be a number >= 0, got {value!r}")
    return float(value)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _rest(fields: dict[str, Any], *used: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in used}
