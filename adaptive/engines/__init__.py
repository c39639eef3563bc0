"""The engine protocol, and a package for each engine that implements it."""
