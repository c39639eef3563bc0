"""The HTTP dialects of clients: each file has one dialect's paths, its request models, and a writer of its responses.

A request is translated to a ``ChatRequest`` or a ``CompletionRequest``, which ``Api`` serves.
"""
