"""Lets the tests here say `import rl_numpy`: the slow, obvious numpy versions in tests/oracle."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
