"""A head: a small draft on the target's own hidden states, grown here."""
