"""Drafters: they propose the next tokens."""
