"""Inter-stage fusion: generation and scoring overlap sample by sample, and the tail migrates.

The idea is RLHFuse's (arXiv 2409.13221 §4). `costs` holds what was measured, `lengths` what past
responses tell, `policy` decides from observed counts and both, `simulator` runs the policy without
devices, `choose` picks a plan by simulation, `spans` and `plot` show what happened. None of these
imports JAX, and the live runtime calls the same policy: what is simulated is what runs.
"""
