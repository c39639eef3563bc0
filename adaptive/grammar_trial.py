"""The process in which a server compiles grammars before it does so itself (``adaptive.service.trials``).

In: lines of JSON on standard input, each the seconds that a grammar may take and the grammar in llguidance's notation.
Out: a line for each that was compiled, or has an error. One that takes longer ends the process, also after its server.
"""

from __future__ import annotations

import json
import signal
import sys

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
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    tokens = LLTokenizer(TokenizerWrapper(Bytes()))
    for line in sys.stdin:
        seconds, grammar = json.loads(line)
        _end_after(seconds)
        LLMatcher(tokens, grammar, log_level=0).compute_bitmask()
        _end_after(0)
        print("tried", flush=True)


def _end_after(seconds: float) -> None:
    """End the process after so many seconds, by a signal that no handler waits for; 0: not."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
