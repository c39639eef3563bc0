"""Heads: small drafts that read the target's hidden states, either grown here or trained elsewhere."""
