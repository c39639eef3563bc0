"""Speculative decoding: the loop, verification, and conversion of tokens to text."""
