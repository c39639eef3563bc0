"""Products and attention for a few tokens in C++, one library for each instruction set; see ``kernels.py``.

They are built where the package is installed and there is a C++ compiler; without them, torch's are used.
"""
