"""What a process does about memory that it no longer needs: keep buffers for their next use, and look for cycles less.

The distributions over a vocabulary of 150,000 are buffers of one to six megabytes, several a token. glibc returns
such to the system when they are freed, and each of their pages is then asked for anew: drawing a token took 1 ms
that takes 0.17 ms, the five distributions of a verification 2.6 ms that take 0.5 ms. With this it returns what is
free at the top of its heap beyond ``KEPT`` bytes. Other C libraries keep theirs.

Python looks for cycles of objects that nobody uses after every 700 new objects, and once more over all of them at the
end. torch and transformers are 370,000 objects that stay: that last look took 1.6 s of the 6 s of processor time of a
command that only imports them, the others 0.4 s.
"""

from __future__ import annotations

import atexit
import ctypes
import gc

# Smaller than this comes from the heap: the most that glibc takes.
LARGE = 1 << 25
# More keeps more from other programs after a long prompt, less returns the buffers of large vocabularies.
KEPT = 1 << 27
# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# New objects between two looks for cycles. More leaves more memory with what is no longer used, a few megabytes here.
OBJECTS = 20_000


def keep_buffers() -> None:
    """From now on; does nothing where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # a library without it, or a system without this way to it
        return
    mallopt(M_MMAP_THRESHOLD, LARGE)
    mallopt(M_TRIM_THRESHOLD, KEPT)


def look_for_cycles_less() -> None:
    """From now on only after every ``OBJECTS`` new objects, and not when the process ends: its memory goes at once."""
    gc.set_threshold(OBJECTS, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)
