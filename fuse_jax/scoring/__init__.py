"""What is computed of a finished sample: reference log-probs, values and scores.

Imports nothing: the worker processes of reward functions live here too and must stay free of JAX.
"""
