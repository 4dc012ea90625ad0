"""What a batch says of a sample must not depend on the row it lies in: fusion deals rows anew."""

import jax
import numpy as np
import pytest

from fuse_jax.models.heads import scalars


@pytest.mark.parametrize("shape", [(3, 36), (3, 37), (7,)])
def test_a_scalar_has_the_same_bits_in_every_row(shape):
    """Of a product with one column, XLA computes the last few rows in another order (on CPU)."""
    rows, *rest = shape
    rng = np.random.default_rng(0)
    row = rng.standard_normal((1, *rest, 64)).astype(np.float32)
    params = {"head": {"kernel": rng.standard_normal((64, 1)).astype(np.float32),
                       "bias": np.ones(1, np.float32)}}  # fmt: skip
    found = np.asarray(jax.jit(scalars)(params, np.repeat(row, rows, 0)))
    np.testing.assert_array_equal(found, np.repeat(found[:1], rows, 0))
    np.testing.assert_allclose(found[0], (row @ params["head"]["kernel"])[0, ..., 0] + 1, atol=1e-5)
