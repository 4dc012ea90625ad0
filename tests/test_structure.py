"""Imports point downwards, and the rooms that must stay free of JAX are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "fuse_jax"

# What each room may import of ours, besides itself. Launch and tests may import everything.
ALLOWED = {
    "config": {"models.architecture"},
    "config_read": {"config"},
    "buckets": set(),
    "samples": {"buckets"},
    "rl": set(),
    "models": {"data.gguf_tokenizer"},
    "data": set(),
    "placement": {"config", "models"},
    "rollout": {"config", "buckets", "samples", "models", "placement", "rl"},
    "scoring": {"config", "buckets", "samples", "models", "placement", "rl"},
    "fusion": set(),
    "fusion.intra_stage": {
        *("models", "placement", "rl", "fusion.chart", "fusion.output", "fusion.trace"),
    },
    "fusion.inter_stage": {
        *("config", "buckets", "samples", "models", "placement", "rollout", "scoring"),
        *("fusion.chart", "fusion.output", "fusion.trace"),
    },
    "training": {
        *("config", "config_read", "buckets", "samples", "data", "models", "placement", "rl"),
        *("rollout", "scoring", "fusion"),
    },
    "benchmarks": {
        *("config", "config_read", "buckets", "samples", "data", "models", "placement", "rl"),
        *("rollout", "scoring", "fusion", "training"),
    },
}
FREE_OF_JAX = (
    "fuse_jax.data.gsm8k",
    "fuse_jax.data.countdown",
    "fuse_jax.fusion.intra_stage.problem",
    "fuse_jax.fusion.intra_stage.schedule",
    "fuse_jax.fusion.intra_stage.bounds",
    "fuse_jax.fusion.intra_stage.search",
    "fuse_jax.fusion.intra_stage.plot",
    "fuse_jax.fusion.inter_stage.policy",
    "fuse_jax.fusion.inter_stage.simulator",
    "fuse_jax.fusion.inter_stage.choose",
    "fuse_jax.fusion.inter_stage.study",
    "fuse_jax.fusion.inter_stage.plot",
)


def imports_of(path: Path) -> set[str]:
    """Names below `fuse_jax` that a module imports, dotted."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fuse_jax":
            inside = (node.module or "").split(".")[1:]
            found |= {".".join([*inside, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {name.partition(".")[2] for name in names if name.startswith("fuse_jax.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.name))
def test_imports_point_downwards(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    room = next(r for r in (".".join(parts[:2]), parts[0]) if r in ALLOWED or r == parts[0])
    if room == "__init__":
        assert not imports_of(path)
        return
    assert room in ALLOWED, f"new room {room}: say in tests/test_structure.py what it may import"
    for name in imports_of(path):
        allowed = any(name == room or f"{name}.".startswith(f"{ok}.") for ok in ALLOWED[room])
        assert allowed or name.startswith(f"{room}."), f"{path.name} must not import {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE.parent / "launch").glob("*.py")), ids=str)
def test_launch_holds_no_logic(path):
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    assert len(functions) <= 3, f"{path.name}: parse, call, print; the rest belongs in fuse_jax/"
    assert sum(1 for _ in path.open()) <= 90


def test_rooms_without_jax():
    script = ";".join(f"import {name}" for name in FREE_OF_JAX)
    check = "import sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", f"{script};{check}"]).returncode == 0
