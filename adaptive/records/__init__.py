"""The log: what the target said, with its distribution, and how speculation went."""
