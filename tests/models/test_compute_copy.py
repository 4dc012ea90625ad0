"""A copy in the compute dtype gives the bits that casting inside each pass gives."""

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuse_jax.models.architecture import Architecture
from fuse_jax.models.compute_copy import compute_copy
from fuse_jax.samples import SequenceBatch
from fuse_jax.scoring.passes import log_prob_pass, value_pass

ARCH = Architecture("qwen2", 37, 16, 24, 1, 4, 2, 8, attention_bias=True)


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 37, (3, 12)).astype(np.int32)
    return SequenceBatch(tokens, np.array([3, 4, 5], np.int32), np.array([7, 2, 6], np.int32))


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_bfloat16_results_keep_every_bit_and_memory_halves(head):
    params = drawn.parameters(ARCH, 0, head)
    params["blocks"]["query"]["bias"] = 0.1 + jnp.zeros_like(params["blocks"]["query"]["bias"])
    if head == "scalar":
        params["head"]["kernel"] = jax.random.normal(jax.random.key(1), (16, 1))
    copy = compute_copy(params, jnp.dtype("bfloat16"))
    run = log_prob_pass if head == "lm" else value_pass
    found = [run(ARCH, p, batch(), length=8, dtype=jnp.bfloat16) for p in (params, copy)]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *found)))

    def size(tree):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    assert size(copy) < 0.6 * size(params)
    assert copy["final_norm"]["scale"].dtype == jnp.float32


def test_float32_is_shared():
    params = drawn.parameters(ARCH, 0)
    copy = compute_copy(params, jnp.dtype("float32"))
    assert all(a is b for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(copy)))
