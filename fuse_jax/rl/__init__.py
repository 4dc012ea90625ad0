"""The mathematics of RLHF with PPO: pure functions on arrays, usable alone.

Legend: B rows (sequences), R response tokens (padded), N pairs or samples, V vocabulary. Everything
per response token is response-aligned `[B, R]`; a mask or weight of 0 marks padding, and what lies
there, NaN and infinity included, changes neither a value nor a gradient by one bit.

masked.py      sums, means and whitening over real tokens only
advantages.py  generalised advantage estimation
kl.py          KL estimators, the adaptive coefficient, early stop
rewards.py     from scores to per-token rewards, running normalisation
weights.py     weights that make every loss a plain sum
losses.py      policy, value, KL, entropy, pairwise and next-token losses
metrics.py     how metrics of micro-batches are put together
"""
