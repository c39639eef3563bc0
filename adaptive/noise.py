"""Noise that is fixed by a seed, with which target and draft make the same choice where their distributions allow it.

With a seed, the token at a position of a text is the winner of a race: the one with the least ``noise / p``. The noise
of each token is an exponential random number computed only from seed, position and token. That is a draw from p (the
Gumbel-max trick: -log(noise) is Gumbel noise on log p). The draft's token at that position is the winner of the same
race under its own q, and is accepted if it is the target's. So a seed fixes the text for every drafter: drafts decide
how soon a token is known, never which token it is. This is coupling by shared randomness, without communication:
Daliri, Musco and Suresh 2024 ("Coupling without communication and drafter-invariant speculative decoding").

A token is accepted less often than by the usual rule: with a probability between (1 - d) / (1 + d) and 1 - d, where d
is the total variation distance of p and q; the usual rule reaches 1 - d. Therefore it is used only if a seed is given.

``native/noise.h`` computes the same numbers in the kernels.
"""

from __future__ import annotations

import torch

from adaptive.tokens import uploaded

WORD, DOUBLE_WORD = 2**32 - 1, 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def keys_of(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys for a position (from 0) of the text."""
    key = _mix(_mix((seed + GOLDEN) & DOUBLE_WORD) + (position + 1) * GOLDEN)
    return key & WORD, key >> 32


def _mix(x: int) -> int:
    """The mixing function of splitmix64."""
    x &= DOUBLE_WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & DOUBLE_WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & DOUBLE_WORD
    return x ^ x >> 31


def _mix_words(x: torch.Tensor) -> torch.Tensor:
    """Mixes 32-bit numbers, held in int64. Products may overflow; only their low 32 bits are used."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return x ^ (x >> 16)


def noise(seed: int, position: int, rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """The noise (rows, vocab) for ``rows`` positions from ``position`` on: exponential random numbers."""
    return _noise(uploaded([keys_of(seed, position + row) for row in range(rows)], torch.long, device), vocab)


def _noise(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """The noise (rows, vocab) for positions with these ``keys_of`` (rows, 2)."""
    device = keys.device
    tokens = torch.arange(vocab, device=device) * (GOLDEN >> 32) & WORD
    bits = _mix_words(_mix_words((tokens + keys[:, :1]) & WORD) ^ keys[:, 1:])
    # At most the largest float32 below 1.
    x = (bits.float() * 2.0**-32 + 2.0**-33).clamp_(max=1 - 2.0**-24)
    return -torch.log1p(-(x if device.type == "mps" else x.double()))  # MPS has no float64


def race(probs: torch.Tensor, seed: int, position: int) -> torch.Tensor:
    """The winners (n,) int64 under probs (n, vocab), which need not be normalised, for positions from ``position`` on.
    A row of NaN gives an arbitrary token."""
    keys = [keys_of(seed, position + row) for row in range(len(probs))]
    return winner(probs, uploaded(keys, torch.long, probs.device))


def winner(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``race`` for positions whose ``keys_of`` (n, 2) are on the device."""
    times = _noise(keys, probs.shape[1]) / probs
    return times.masked_fill(~(probs > 0), torch.inf).argmin(-1)
