"""Rule reward for GSM8K (Cobbe et al., arXiv 2110.14168): is the last number the right one?

Plain Python without imports of ours: it runs in worker processes and starts at once. Name it in a
config by its import path, `fuse_jax.data.gsm8k:reward`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

# 72 · 1,080 · $3.50 · -7 ; "16-3" holds 16 and 3, for a minus sign does not follow a digit there.
_NUMBER = re.compile(r"((?<![\w)])-)?(?:\$(-?))?(\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?)")


def last_number(text: str) -> Decimal | None:
    """The last number in a text, without thousands' commas and dollar signs; None if none."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    before, after, digits = numbers[-1]
    return Decimal(("-" if before or after else "") + digits.replace(",", ""))


def reference_answer(answer: str) -> Decimal:
    """The number behind the last "####" of a reference solution.

    Raises:
      ValueError: no "####", or no number behind it.
    """
    _, mark, final = answer.rpartition("####")
    number = last_number(final) if mark else None
    if number is None:
        raise ValueError(f"no '#### number' in the reference answer: …{answer[-60:]!r}")
    return number


def reward(prompt: str, response: str, meta: dict[str, Any]) -> float:
    """1.0 if the response's last number equals the reference's, else 0.0 (also without a number).

    `meta["answer"]` is the reference solution as GSM8K has it, ending in "#### 72".

    Raises:
      ValueError: the row has no usable `answer` (the sample is then excluded and counted).
    """
    if not isinstance(meta.get("answer"), str):
        raise ValueError(f"the GSM8K reward needs meta['answer'], got fields {sorted(meta)}")
    return float(last_number(response) == reference_answer(meta["answer"]))
