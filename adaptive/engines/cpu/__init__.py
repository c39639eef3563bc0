"""Our own forward on a CPU, for the architectures that ``families.py`` recognises."""
