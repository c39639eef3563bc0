"""The ways in which clients ask: each file has one dialect's paths, its requests, and a writer of its responses.

A request is translated to a ``ChatRequest`` or a ``CompletionRequest``, which ``Api`` serves.
"""
