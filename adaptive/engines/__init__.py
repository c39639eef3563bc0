"""The model protocol, and who implements it."""
