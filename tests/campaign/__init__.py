"""A campaign against everything that may happen to a machine: ``python -m tests.campaign --help``.

Real servers, real clients, real kills, a real full file system. Its parts run apart, and a scale makes each shorter.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The helpers of the tests are modules beside this package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
