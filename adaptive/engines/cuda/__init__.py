"""Our forward for short passes on a CUDA device."""
