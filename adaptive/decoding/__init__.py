"""Speculative decoding: the loop, drafters, verification, sampling."""
