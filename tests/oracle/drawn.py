"""Random parameters drawn by numpy: to compile `init` takes longer than most tests here."""

import jax
import jax.numpy as jnp
import numpy as np

from fuse_jax.models.transformer import init


def parameters(arch, seed, head="lm"):
    """As large as those of `init`, leaf by leaf; a scalar head is 0, as there."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init(arch, jax.random.key(0), head=head))

    def draw(path, leaf):
        names = [part.key for part in path]
        if names[-1] == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        if names[-1] == "bias" or (names[0] == "head" and head == "scalar"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        deviation = leaf.shape[-1 if names[-1] == "embedding" else -2] ** -0.5
        if names[-2] in ("attention_out", "down"):
            deviation *= (2 * arch.num_layers) ** -0.5
        return jnp.asarray(deviation * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)
