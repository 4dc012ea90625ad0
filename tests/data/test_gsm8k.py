"""The rule reward: numbers as people write them, wrong answers, unusable references."""

import subprocess
import sys
from decimal import Decimal

import pytest

from fuse_jax.data.gsm8k import last_number, reference_answer, reward


@pytest.mark.parametrize(
    "text, number",
    [
        ("She sold 48/2 = 24 clips. #### 72", "72"),
        ("The answer is 1,080.", "1080"),
        ("about $3.50!", "3.5"),
        ("it is -7", "-7"),
        ("a loss of -$12,000,000", "-12000000"),
        ("$-5", "-5"),
        ("so 16-3", "3"),
        ("(20)-3", "3"),
        ("x-2", "2"),
        ("1, 2, 3", "3"),
        ("1,2,3", "3"),
        ("<<9*2=18>>18 dollars", "18"),
        ("72.0", "72"),
        ("the 5th, 6%", "6"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


def test_reward():
    meta = {"answer": "It is 5 and 6.\n#### 1,080"}
    assert reward("q", "I think 1080 dollars.", meta) == 1.0
    assert reward("q", "1080.00", meta) == 1.0
    assert reward("q", "1080 or 1081", meta) == 0.0
    assert reward("q", "6", meta) == reward("q", "none", meta) == 0.0
    assert isinstance(reward("q", "1080", meta), float)


def test_unusable_references_are_errors():
    with pytest.raises(ValueError, match="no '#### number'"):
        reference_answer("it is 72")
    with pytest.raises(ValueError, match="no '#### number'"):
        reference_answer("it is 72 ####")
    with pytest.raises(ValueError, match=r"needs meta\['answer'\], got fields \['x'\]"):
        reward("q", "1", {"x": 1})


def test_long_responses_are_fast():
    import time

    start = time.process_time()
    for text in ("9" * 100_000, "1,234," * 30_000, "-$" * 50_000):
        last_number(text)
    assert time.process_time() - start < 2


def test_worker_import_is_light_and_data_needs_no_jax():
    script = (
        "import sys, fuse_jax.data.gsm8k\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
        "import fuse_jax.data.countdown, fuse_jax.data.loading, fuse_jax.data.packing\n"
        "import fuse_jax.data.gguf_tokenizer\n"
        "assert not {'jax', 'transformers', 'torch', 'pyarrow', 'gguf'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
