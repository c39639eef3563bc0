"""Speculative decoding: the loop and verification, and tokens as text."""
