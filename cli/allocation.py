"""Memory that a process keeps between two uses, instead of giving it back to the system each time.

The distributions over a vocabulary of 150,000 are buffers of one to six megabytes, several a token. glibc returns
such to the system when they are freed, and each of their pages is then asked for anew: drawing a token took 1 ms
that takes 0.17 ms, the five distributions of a verification 2.6 ms that take 0.5 ms. With this it returns what is
free at the top of its heap beyond ``KEPT`` bytes. Other C libraries keep theirs.
"""

from __future__ import annotations

import ctypes

# Smaller than this comes from the heap: the most that glibc takes.
LARGE = 1 << 25
# More keeps more from other programs after a long prompt, less returns the buffers of large vocabularies.
KEPT = 1 << 27
# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_buffers() -> None:
    """From now on; does nothing where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # a library without it, or a system without this way to it
        return
    mallopt(M_MMAP_THRESHOLD, LARGE)
    mallopt(M_TRIM_THRESHOLD, KEPT)
