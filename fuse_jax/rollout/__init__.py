"""Generation: the slot engine, its sampler, and continuous batching on the host."""
