"""A proxy in front of another inference server: it logs the answers, so that a draft can be distilled for that
server."""
