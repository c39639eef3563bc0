"""GGUF files as engines, by llama.cpp's library."""
