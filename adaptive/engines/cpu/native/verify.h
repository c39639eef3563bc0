// The acceptance rule of decoding/verify.py, and a pass of the target with it, in one call.

#pragma once

#include "decoder.h"
#include "sampling.h"

namespace {

// What becomes of K drafted tokens. `extra` is the token that the target adds, -1 where its logits are no numbers;
// `used` says how many random numbers that took.
struct Verdict {
  int accepted = 0, used = 0;
  int64_t extra = -1;
};

// What drafted tokens are judged by, beside the target's logits: the distributions q (K, fewer) that they were drawn from, or
// none where each was the only one that could come, and uniform random numbers (K + 2,) below 1. Neither counts where the likeliest token stands, nor with a seed.
struct Evidence {
  const float* q;
  int64_t fewer;
  const double* uniform;
  const uint32_t* const* allowed;  // by row, the tokens that may stand there, as `leave_out` takes them; null for all, in a row or at all
};

// Row n of logits (K + 1, vocab), without the tokens that may not stand there.
const float* row_of(const float* logits, int64_t vocab, int n, const Evidence& e) {
  logits += n * vocab;
  if (!e.allowed || !e.allowed[n]) return logits;
  float* masked = scratch<float, 31>(vocab);
  std::copy_n(logits, vocab, masked);
  leave_out(e.allowed[n], masked, vocab);
  return masked;
}

// The usual rule: what it commits has the law of p whatever q is. `chosen` (K + 1,) takes the log-probability of every
// token that is committed.
Verdict judge_by_q(const Sampling& sampling, const float* logits, int64_t vocab, const int64_t* drafted, int count,
                   const Evidence& e, double* chosen) {
  Verdict v;
  float* p = scratch<float, 14>(vocab);
  int& n = v.accepted;
  for (;; n++) {
    probabilities(sampling.cuts, row_of(logits, vocab, n, e), p, 1, vocab);
    if (n == count) break;
    const int64_t token = drafted[n];
    const double q_x = !e.q ? 1 : token < e.fewer ? e.q[n * e.fewer + token] : 0, p_x = p[token];
    if (!(e.uniform[v.used++] * q_x < p_x)) break;  // nor where q is no number
    chosen[n] = std::log(p_x);
  }
  if (n < count && !e.q) p[drafted[n]] = 0;
  v.extra = n < count ? draw(p, e.q ? e.q + n * e.fewer : nullptr, vocab, e.fewer, e.uniform[v.used++]) : -1;
  // All accepted; or p == q up to rounding leaves nothing to draw from, and p is the right one.
  if (v.extra < 0) v.extra = draw(p, nullptr, vocab, 0, e.uniform[v.used++]);
  if (v.extra >= 0) chosen[n] = std::log(p[v.extra]);
  return v;
}

// The rule under a seed, and the greedy one: a drafted token stands if it is the target's own choice.
Verdict judge_by_choice(const Sampling& sampling, const float* logits, int64_t vocab, const int64_t* drafted, int count,
                        int64_t position, const Evidence& e, double* chosen) {
  Verdict v;
  float* p = sampling.greedy ? nullptr : scratch<float, 14>(vocab);
  for (int& n = v.accepted;; n++) {
    const float* row = row_of(logits, vocab, n, e);
    if (p) {
      probabilities(sampling.cuts, row, p, 1, vocab);
      v.extra = race(p, vocab, keys_of(sampling.seed, position + n));
      if (v.extra >= 0) chosen[n] = std::log(double(p[v.extra]));
    } else {
      v.extra = likeliest(row, vocab);
    }
    if (n == count || drafted[n] != v.extra) return v;  // nor where the logits are no numbers
  }
}

// What stands of K drafted tokens, given logits (K + 1, vocab) of the target for the tokens at `position` of the text and
// behind it. Positions behind the first that falls are not looked at.
Verdict judge(const Sampling& sampling, const float* logits, int64_t vocab, const int64_t* drafted, int count,
              int64_t position, const Evidence& evidence, double* chosen) {
  return sampling.greedy || sampling.seeded
             ? judge_by_choice(sampling, logits, vocab, drafted, count, position, evidence, chosen)
             : judge_by_q(sampling, logits, vocab, drafted, count, evidence, chosen);
}

}  // namespace
