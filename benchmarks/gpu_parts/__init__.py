"""The parts of ``gpu.py``: what is made on the device, what is checked there, what is timed, how it is written down."""
