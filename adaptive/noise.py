"""Noise that a seed fixes: the same choice for target and draft, wherever their distributions allow it.

With a seed, the token at a position of a text is the one that wins a race: of the least ``noise / p``, where the
noise of every token is an exponential random number computed from seed, position and token alone. That is a draw from
p (the Gumbel-max trick: -log(noise) is Gumbel noise on log p). The draft's token at that position is the winner of
the same race under its own q, and stands if it is the target's. So a seed fixes the text, whoever proposes: what is
drafted decides how soon a token is known, never which. Coupling by shared randomness, without a word between the two:
Daliri, Musco and Suresh 2024 ("Coupling without communication and drafter-invariant speculative decoding").

A token is accepted less often than by the usual rule (between (1 - d) / (1 + d) and 1 - d, where d is the distance in
total variation between p and q; the usual rule reaches 1 - d), which is why it is used where a seed is given only.

``native/noise.h`` computes the same numbers in the kernels.
"""

from __future__ import annotations

import torch

from adaptive.tokens import uploaded

WORD, DOUBLE_WORD = 2**32 - 1, 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def keys_of(seed: int, position: int) -> tuple[int, int]:
    """Two keys of 32 bits for a position (from 0) of the text."""
    key = _mix(_mix((seed + GOLDEN) & DOUBLE_WORD) + (position + 1) * GOLDEN)
    return key & WORD, key >> 32


def _mix(x: int) -> int:
    """splitmix64's."""
    x &= DOUBLE_WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & DOUBLE_WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & DOUBLE_WORD
    return x ^ x >> 31


def _mix_words(x: torch.Tensor) -> torch.Tensor:
    """Of numbers of 32 bits, as int64, which what is above them may leave."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return x ^ (x >> 16)


def noise(seed: int, position: int, rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """The noise (rows, vocab) of positions ``position`` on: exponential random numbers."""
    return _noise(uploaded([keys_of(seed, position + row) for row in range(rows)], torch.long, device), vocab)


def _noise(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """The noise (rows, vocab) of the positions of which these are the ``keys_of`` (rows, 2)."""
    device = keys.device
    tokens = torch.arange(vocab, device=device) * (GOLDEN >> 32) & WORD
    bits = _mix_words(_mix_words((tokens + keys[:, :1]) & WORD) ^ keys[:, 1:])
    # Below 1 by as little as a number of 32 bits can be.
    x = (bits.float() * 2.0**-32 + 2.0**-33).clamp_(max=1 - 2.0**-24)
    return -torch.log1p(-(x if device.type == "mps" else x.double()))  # one kind of device has no float64


def race(probs: torch.Tensor, seed: int, position: int) -> torch.Tensor:
    """The winners (n,) int64 under probs (n, vocab), not necessarily normalised, of positions ``position`` on. Of
    what are no numbers any token."""
    keys = [keys_of(seed, position + row) for row in range(len(probs))]
    return winner(probs, uploaded(keys, torch.long, probs.device))


def winner(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The same of the positions of which these are the ``keys_of`` (n, 2), where the device has them."""
    times = _noise(keys, probs.shape[1]) / probs
    return times.masked_fill(~(probs > 0), torch.inf).argmin(-1)
