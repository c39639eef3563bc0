"""Targets whose weights do not fit into memory: layers read from disk while others compute."""
