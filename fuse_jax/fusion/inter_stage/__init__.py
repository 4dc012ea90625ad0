"""Inter-stage fusion: generation and scoring overlap sample by sample, and the tail migrates.

The idea is RLHFuse's (arXiv 2409.13221 §4). `policy` decides from observed counts and from measured
costs (`costs`, `fitting`) and lengths (`lengths`); the live `runtime` and the `simulator` ask the
same functions, so what is simulated is what runs. `choose` picks the plan of an iteration by
simulation, `bound` says how fast any could be, `spans` is the timeline both worlds share, `plot`
and `sweep` draw it, `study` compares policies for `launch/simulate.py`. Of all these only the
runtime and what it is made of import JAX.
"""
