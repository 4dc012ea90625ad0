"""What `launch/benchmark.py` runs; every benchmark prints JSON lines."""
