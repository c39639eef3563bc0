"""Kernels for passes over a few tokens in C++, one library for each instruction set; see ``kernels.py``.

They are built when the package is installed and a C++ compiler exists; without them torch's operations are used.
"""
