"""The log: the target's answers with their distributions, and the outcome of every speculative round."""
