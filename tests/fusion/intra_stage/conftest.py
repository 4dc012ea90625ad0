"""Lets the tests here say `import check_schedule`: the independent judge in tests/oracle."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "oracle"))
