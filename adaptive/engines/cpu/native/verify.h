// The acceptance rule of decoding/verify.py, which module.h combines with a pass of the target in one call.

#pragma once

#include "decoder.h"
#include "sampling.h"

namespace {

// The verdict on K drafted tokens: how many are accepted, how many random numbers were `used`, and the token that the
// target adds (`extra`), -1 if its logits are NaN.
struct Verdict {
  int accepted = 0, used = 0;
  int64_t extra = -1;
};

// The inputs of the acceptance rule beside the target's logits: the distributions q (K, fewer) that the drafted tokens
// were drawn from (null: each had probability 1), and uniform random numbers (K + 2,) below 1. Greedy or with a seed
// neither is used.
struct Evidence {
  const float* q;
  int64_t fewer;
  const double* uniform;
  const uint32_t* const* allowed;  // by row, the allowed tokens as in `leave_out`; null for all, in one row or in all
};

// Row n of logits (K + 1, vocab), without the tokens that are not allowed there.
const float* row_of(const float* logits, int64_t vocab, int n, const Evidence& e) {
  logits += n * vocab;
  if (!e.allowed || !e.allowed[n]) return logits;
  float* masked = scratch<float, 31>(vocab);
  std::copy_n(logits, vocab, masked);
  leave_out(e.allowed[n], masked, vocab);
  return masked;
}

// The usual rule: the committed tokens have the distribution p, whatever q is. Writes the log-probability of every
// committed token into `chosen` (K + 1,).
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
    if (!(e.uniform[v.used++] * q_x < p_x)) break;  // also rejects if q is NaN
    chosen[n] = std::log(p_x);
  }
  if (n < count && !e.q) p[drafted[n]] = 0;
  v.extra = n < count ? draw(p, e.q ? e.q + n * e.fewer : nullptr, vocab, e.fewer, e.uniform[v.used++]) : -1;
  // All are accepted; or p - q has no mass because p == q up to rounding, and then p is right.
  if (v.extra < 0) v.extra = draw(p, nullptr, vocab, 0, e.uniform[v.used++]);
  if (v.extra >= 0) chosen[n] = std::log(p[v.extra]);
  return v;
}

// The rule with a seed, and the greedy one: a drafted token is accepted if it is the target's own choice.
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
    if (n == count || drafted[n] != v.extra) return v;  // also returns if the logits are NaN
  }
}

// Judges K drafted tokens by the target's logits (K + 1, vocab) for the tokens from `position` of the text on. Logits
// behind the first rejected token are not read.
Verdict judge(const Sampling& sampling, const float* logits, int64_t vocab, const int64_t* drafted, int count,
              int64_t position, const Evidence& evidence, double* chosen) {
  return sampling.greedy || sampling.seeded
             ? judge_by_choice(sampling, logits, vocab, drafted, count, position, evidence, chosen)
             : judge_by_q(sampling, logits, vocab, drafted, count, evidence, chosen);
}

}  // namespace
