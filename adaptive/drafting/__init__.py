"""Who proposes the next tokens."""
