"""Is every Triton kernel right on this GPU, and how fast: `python -m benchmarks.gpu_check --out DIR`."""
