"""Peak memory of loading: the target's shards and at most twice the largest tensor."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fuse_jax.models import families, hf_config, safetensors_io
from fuse_jax.models.architecture import Architecture

# Warm up on a tiny model (imports, runtime, compiler), then load and watch the peak.
CHILD = r"""
import json, os, resource, sys
import jax
from fuse_jax.config import MeshConfig
from fuse_jax.models import hf, streaming
from fuse_jax.placement.mesh import make_mesh
from fuse_jax.placement.sharding import parameter_specs

def load(directory):
    arch = hf.read_architecture(directory)
    mesh = make_mesh(MeshConfig(*json.loads(sys.argv[3])))
    specs = parameter_specs(arch, hf.parameter_shapes(arch), mesh)
    return hf.load_params(directory, arch, specs)

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

size, streaming.PIECE_BYTES = streaming.PIECE_BYTES, 4096  # so that the compiler is warm too
load(sys.argv[1])
streaming.PIECE_BYTES = size
baseline = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
params = load(sys.argv[2])
leaves = jax.tree.leaves(params)
print(json.dumps({
    "baseline": baseline,
    "peak": status("VmHWM"),
    "target": sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards),
    "sum": float(sum(leaf.sum() for leaf in leaves)),
}))
"""


def write_directory(directory: Path, arch: Architecture, max_shard_bytes: int) -> dict:
    """bfloat16 weights, every one 2^-10, made file by file."""
    directory.mkdir()
    dtype = np.dtype(ml_dtypes.bfloat16)
    planned = [
        safetensors_io.Planned(
            name,
            math.prod(leaf.hf_shape) * dtype.itemsize,
            lambda shape=leaf.hf_shape: np.full(shape, 2.0**-10, dtype),
        )
        for leaf in families.leaves(arch, "lm").values()
        for name in leaf.names
    ]
    safetensors_io.write(directory, planned, max_shard_bytes)
    config = hf_config.config_of(arch, head="lm", dtype="bfloat16", token_ids={})
    safetensors_io.write_json(directory / "config.json", config)
    sizes = [tensor.nbytes for tensor in planned]
    return {"total": sum(sizes), "largest": max(sizes), "count": sum(sizes) // dtype.itemsize}


def measure(tmp_path: Path, arch: Architecture, mesh: tuple[int, int, int], shard: int) -> dict:
    tiny = Architecture(vocab_size=32, num_heads=2, hidden_size=64, intermediate_size=96)
    write_directory(tmp_path / "tiny", tiny, shard)
    sizes = write_directory(tmp_path / "big", arch, shard)
    assert len(list((tmp_path / "big").glob("*.safetensors"))) > 2
    command = [sys.executable, "-c", CHILD, str(tmp_path / "tiny"), str(tmp_path / "big")]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*command, json.dumps(mesh)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["sum"] == pytest.approx(sizes["count"] * 2.0**-10, rel=1e-3)
    over = seen["peak"] - seen["baseline"] - seen["target"]
    print(
        f"directory {sizes['total'] / 1e6:.0f} MB, target {seen['target'] / 1e6:.0f} MB, largest "
        f"tensor {sizes['largest'] / 1e6:.1f} MB, peak over target {over / 1e6:.1f} MB"
    )
    return {**sizes, **seen, "over": over}


linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@linux
def test_a_small_directory_is_streamed(tmp_path):
    arch = Architecture(
        vocab_size=20480,
        hidden_size=1024,
        intermediate_size=2048,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=128,
        tie_embeddings=True,
    )
    seen = measure(tmp_path, arch, (1, 1, 1), 20 << 20)
    assert seen["over"] <= 2 * seen["largest"]


@linux
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 4, 2)])
def test_half_a_gigabyte_is_streamed(tmp_path, mesh):
    arch = Architecture(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=14,
        num_heads=8,
        num_kv_heads=4,
        head_dim=128,
    )
    seen = measure(tmp_path, arch, mesh, 150 << 20)
    assert seen["total"] >= 500_000_000
    assert seen["over"] <= 2 * seen["largest"]
