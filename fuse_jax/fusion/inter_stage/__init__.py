"""Inter-stage fusion: generation and scoring overlap sample by sample, and the tail migrates.

The idea is RLHFuse's (arXiv 2409.13221 §4). `costs` holds what was measured, `policy` decides from
observed counts and those costs, `simulator` runs the policy without devices, `choose` picks the plan
by simulation, `spans` and `plot` show what happened. None of these imports JAX, and the live
runtime calls the same policy: what is simulated is what runs.
"""
