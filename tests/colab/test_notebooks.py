"""The notebooks run from top to bottom, as a reader would run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COLAB = Path(__file__).resolve().parents[2] / "colab"


def code(notebook: Path) -> str:
    """All code cells, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


@pytest.mark.parametrize("notebook", sorted(COLAB.glob("*.ipynb")), ids=lambda path: path.stem)
def test_cells_compile_and_are_kept_without_outputs(notebook):
    compile(code(notebook), str(notebook), "exec")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted(COLAB.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(notebook, tmp_path):
    settings = {**os.environ, "MPLBACKEND": "agg", "TMPDIR": str(tmp_path), "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code(notebook)],
        cwd=COLAB,
        env=settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.splitlines()[-2:]
    assert [line.split()[0] for line in last] == ["clipped", "smooth"]
    for line in last:
        before, _, after = line.split()[-3:]
        assert float(after) > float(before)
