"""The suffix index in C++; see ``drafting/suffixes.py``, whose own is used where this was not built."""
