"""The online path: speculative decoding of a target with a draft that learns from it."""
