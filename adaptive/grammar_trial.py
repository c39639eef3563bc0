"""The process in which a server compiles grammars before it does so itself (``adaptive.service.trials``).

In: lines of JSON on standard input, each the seconds that a grammar may take and the grammar in llguidance's notation.
Out: a line for each that was compiled, or has an error. One that takes longer ends the process, also after its server.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress

# Bytes of memory for the process. The largest schemas that can be used take a tenth.
MEMORY = 2 << 30


class Bytes:
    """The smallest tokenizer that llguidance takes: a token for each byte, and one for the end. The time that a grammar
    takes depends little on the tokenizer."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    """Try each grammar."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the server, which then ends this process
    limit_memory()
    tokens = LLTokenizer(TokenizerWrapper(Bytes()))
    for line in sys.stdin:
        seconds, grammar = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # ends the process by a signal that no handler waits for
        LLMatcher(tokens, grammar, log_level=0).compute_bitmask()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("tried", flush=True)


def limit_memory() -> None:
    """Allow this process MEMORY, or less if that is all that it may have. Nothing where the system takes no such limit,
    as macOS may not."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most), most))


if __name__ == "__main__":
    main()
