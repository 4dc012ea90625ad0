"""Lets the tests here say `import check_schedule`: the independent judge in tests/oracle.

And `import faults`: an operation beside them that fails on demand.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "oracle"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
