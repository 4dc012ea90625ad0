"""RLHF in JAX with inter- and intra-stage fusion (RLHFuse, arXiv 2409.13221)."""

__version__ = "0.1.0"
