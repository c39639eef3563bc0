"""In front of a server that somebody else runs: what passes through is logged, so that a draft is distilled for it."""
