"""Engines for transformers' checkpoints: its own forward with our cache, LoRA merged in place, CUDA graphs."""
