"""Lets the tests here say `import ppo_numpy`: toy experience and the unbatched oracle."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
