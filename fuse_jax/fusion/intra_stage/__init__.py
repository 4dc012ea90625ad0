"""Intra-stage fusion: two pipelines in opposite directions fill each other's bubbles.

The unit is the micro-batch (RLHFuse, arXiv 2409.13221 §5). `problem` says what is to be
scheduled, `schedule` is an order per device as data, `cost` times it under the transport that
will run it, `bounds` says how fast any schedule can be, `baselines` are the schedules to beat and
`search` finds the one to run. Nothing in those modules imports JAX.
"""
