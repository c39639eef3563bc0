"""The ``adaptive`` command."""
