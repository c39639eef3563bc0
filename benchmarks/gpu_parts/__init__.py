"""The parts of ``gpu.py``: the models made on the device, the checks, the timings, and the reports."""
