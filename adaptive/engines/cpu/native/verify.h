// The acceptance rule of decoding/verify.py, and a pass of the target with it, in one call.

#pragma once

#include "decoder.h"
#include "sampling.h"

extern "C" {

// What drafted tokens are judged by, and what comes of it beside the number that stands; the same in kernels.py.
struct Rule {
  const Cuts* cuts;      // null: the likeliest token stands
  const float* q;        // (count, fewer): the distributions that the tokens were drawn from
  const double* shares;  // (count + 2,): uniform random numbers below 1
  double* chosen;        // (count + 1,): the log-probability of every token that is committed, unless it is the likeliest
  int64_t fewer, extra;  // the token that the target adds, -1 where its logits are no numbers
  int32_t count, used;   // of tokens; of random numbers
};

// How many of the drafted tokens stand, given logits (count + 1, vocab) of the target. Positions behind the first that
// falls are not looked at. -1 where a token is none of the vocabulary.
int judge(Rule* rule, const float* logits, int64_t vocab, const int64_t* drafted) {
  const float* q = rule->q;
  const double* shares = rule->shares;
  const int64_t fewer = rule->fewer;
  const int count = rule->count;
  for (int i = 0; i < count; i++)
    if (drafted[i] < 0 || drafted[i] >= vocab) return -1;
  int n = 0;
  rule->used = 0;
  if (!rule->cuts) {
    for (;; n++) {
      rule->extra = likeliest(logits + n * vocab, vocab);
      if (n == count || drafted[n] != rule->extra) return n;  // nor where the logits are no numbers
    }
  }
  float* p = room<float, 14>(vocab);
  for (;; n++) {
    probabilities(rule->cuts, logits + n * vocab, p, 1, vocab);
    if (n == count) break;
    const int64_t token = drafted[n];
    const double q_x = token < fewer ? q[n * fewer + token] : 0, p_x = p[token];
    if (!(shares[rule->used++] * q_x < p_x)) break;  // nor where q is no number
    rule->chosen[n] = std::log(p_x);
  }
  rule->extra = n < count ? draw(p, q + n * fewer, vocab, fewer, shares[rule->used++]) : -1;
  // All accepted; or p == q up to rounding leaves nothing to draw from, and p is the right one.
  if (rule->extra < 0) rule->extra = draw(p, nullptr, vocab, 0, shares[rule->used++]);
  if (rule->extra >= 0) rule->chosen[n] = std::log(p[rule->extra]);
  return n;
}

// The same for the last of tokens (n,), and their logits, by one pass as `decode` makes it.
int verify(const Decoder* decoder, Rule* rule, const int64_t* tokens, int n, const float* turns, float* const* caches,
           int64_t capacity, int start, float* logits, int threads) {
  if (!decode(decoder, tokens, n, rule->count + 1, turns, caches, capacity, start, logits, threads)) return -1;
  return judge(rule, logits, decoder->head->out, tokens + n - rule->count);
}
}
