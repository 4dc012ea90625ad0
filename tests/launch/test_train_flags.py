"""A wrong key, type or recipe on train.py's command line: one line that names it, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.ppo.iteration=3"], "--config.ppo.iteration=3: no such setting"),
        (["--config.kl=1"], "--config.kl=1: no such setting"),
        (["--config.ppo.iterations=abc"], "--config.ppo.iterations=abc"),
        (["--config=configs/nope.py"], "--config=configs/nope.py: no such file"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_refused_in_one_line(arguments, words, tmp_path):
    command = ["launch/train.py", "--config=configs/quickstart.py", f"--workdir={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, *command, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0 and not (tmp_path / "run").exists()
    assert words in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.strip().startswith("error: ")
