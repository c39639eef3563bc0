"""Targets whose weights do not fit into memory: some layers are read from disk while others compute."""
