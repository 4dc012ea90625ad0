"""Prompts, preferences and demonstrations: files, tokenizers, order, packing and the built-in task.

Everything here is numpy and plain Python; no module of this package imports JAX, and importing the
package itself imports nothing at all, so that reward functions start fast in worker processes.
"""
