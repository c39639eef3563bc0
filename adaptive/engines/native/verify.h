// The acceptance rule of decoding/verify.py in one call, for logits and distributions that the processor holds.

#pragma once

#include "sampling.h"

extern "C" {

// How many of `count` drafted tokens stand, given logits (count + 1, vocab) of the target and the distributions
// q (count, fewer) that they were drawn from. `extra` is the token that the target adds, -1 where its probabilities are no
// numbers; `chosen` (count + 1,) the log-probability of every token that is committed. `shares` (count + 2,) are uniform
// random numbers below 1, of which the first `used` were wanted. Positions behind the first that falls are not looked at.
// -1 where a token is none of the vocabulary.
int verify(const Cuts* cuts, const float* logits, int64_t vocab, const int64_t* drafted, int count, const float* q,
           int64_t fewer, const double* shares, int64_t* extra, double* chosen, int* used) {
  float* p = room<float, 14>(vocab);
  int n = 0;
  for (int i = 0; i < count; i++)
    if (drafted[i] < 0 || drafted[i] >= vocab) return -1;
  *used = 0;
  for (;; n++) {
    probabilities(cuts, logits + n * vocab, p, 1, vocab);
    if (n == count) break;
    const int64_t token = drafted[n];
    const double q_x = token < fewer ? q[n * fewer + token] : 0, p_x = p[token];
    if (!(shares[(*used)++] * q_x < p_x)) break;  // nor where q is no number
    chosen[n] = std::log(p_x);
  }
  *extra = n < count ? draw(p, q + n * fewer, vocab, fewer, shares[(*used)++]) : -1;
  // All accepted; or p == q up to rounding leaves nothing to draw from, and p is the right one.
  if (*extra < 0) *extra = draw(p, nullptr, vocab, 0, shares[(*used)++]);
  if (*extra >= 0) chosen[n] = std::log(p[*extra]);
  return n;
}
}
