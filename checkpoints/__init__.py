"""The adapter store, and the bundled pair."""
