"""The protocol of a model, and an engine in each package behind it."""
