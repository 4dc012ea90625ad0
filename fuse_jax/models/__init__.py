"""Transformers as pure functions over stacked parameters, their heads, and HF conversion."""
