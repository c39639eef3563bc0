"""GGUF files through llama.cpp's library."""
