// A whole proposal of a draft: pass, choice, next pass, in one call, so that nothing else runs between two of its tokens.

#pragma once

#include "decoder.h"
#include "sampling.h"

namespace {

// What comes of a position whose distribution is known; the numbers of Advice in control/policy.py.
enum Advice { DROP, LAST, MORE };

// The probability of a token whose logit is the largest.
inline float probability(const float* logits, int64_t count, float top) {
  Vector sums = {};
  float sum = 0;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sums += exponential(at(logits + i) - top);
  for (; i < count; i++) sum += std::exp(logits[i] - top);
  return 1 / (sum + total(sums));
}

// Who says what becomes of a position (from 1), by the largest probability there, before anything is drawn: thresholds
// (control/stopping.py says what they are, and applies them as `advised` does), or somebody who is asked, or nobody.
struct Stopping {
  const double *edges, *accepted, *follow, *drop_below, *last_below;
  int32_t* bins;    // (kept, longest) of the confidence at each position that was asked about, by draft
  int32_t* asked;   // (kept,) how many of them
  int32_t* drafts;  // (1,) how many there were
  double* reach;    // (1,) probability that all up to there are accepted
  int32_t count, longest, kept;
};

struct Adviser {
  const Stopping* stopping;
  int (*ask)(void* whom, int position, float confidence);
  void* whom;

  bool any() const { return stopping || ask; }
};

int advised(const Stopping& s, int position, double confidence) {
  if (position > s.longest) return DROP;
  const int bin = std::upper_bound(s.edges, s.edges + s.count, confidence) - s.edges;
  if (position == 1) ++*s.drafts;
  const int row = (*s.drafts - 1) % s.kept;
  s.bins[row * s.longest + position - 1] = bin;
  s.asked[row] = position;
  *s.reach = (position > 1 ? *s.reach : 1) * s.accepted[bin];
  if (*s.reach < s.drop_below[position - 1]) return DROP;
  return position == s.longest || *s.reach * s.follow[bin] <= s.last_below[position - 1] ? LAST : MORE;
}

// At most `length` tokens of the first `known` ids after tokens (n,), into `drafted`; the rest as in `decode`. Drawn by
// `uniform` (length,), where in each distribution's mass its token is, from what is left in `probs` (length, known); with
// a seed or the likeliest neither counts. Says how many, and in `passed` how many tokens were added to the caches; -1 where
// a token is none of the vocabulary.
int draft(const Decoder& decoder, const Sampling& sampling, const Adviser& adviser, int length, int64_t known,
          const double* uniform, float* probs, const int64_t* tokens, int n, const float* cos_sin, float* const* caches,
          int64_t capacity, int start, const Features& features, Recall recall, int64_t* drafted, int* passed, int threads) {
  const int64_t vocab = std::min<int64_t>(known, decoder.head->out);
  float* logits = scratch<float, 13>(decoder.head->out);
  *passed = 0;
  for (int position = 0; position < length; position++) {
    const Text text{n, 1, cos_sin, caches, capacity, start + *passed, features, nullptr, recall};
    if (!decode(decoder, tokens, &text, 1, logits, threads)) return -1;
    recall = recall.behind(n);
    cos_sin += size_t(n) * decoder.attention->cos_sin_stride;
    *passed += n;
    float* row = sampling.greedy ? nullptr : sampling.seeded ? scratch<float, 14>(vocab) : probs + position * vocab;
    if (row) probabilities(sampling.cuts, logits, row, 1, vocab);
    // Of what are no numbers any token: the target will not have it.
    int64_t token = row ? 0 : std::max<int64_t>(likeliest(logits, vocab), 0);
    int advice = MORE;
    if (adviser.any()) {
      const float confidence = row ? largest(row, vocab) : probability(logits, vocab, logits[token]);
      advice = adviser.stopping ? advised(*adviser.stopping, position + 1, confidence)
                                : adviser.ask(adviser.whom, position + 1, confidence);
    }
    if (advice == DROP) return position;
    if (row)
      token = sampling.seeded ? race(row, vocab, keys_of(sampling.seed, start + *passed))
                              : draw(row, nullptr, vocab, 0, uniform[position]);
    drafted[position] = token = std::max<int64_t>(token, 0);
    if (advice == LAST) return position + 1;
    tokens = drafted + position;
    n = 1;
  }
  return length;
}

}  // namespace
