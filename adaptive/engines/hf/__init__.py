"""Checkpoints of transformers: its own forward over a cache of ours, LoRA in place, CUDA graphs."""
