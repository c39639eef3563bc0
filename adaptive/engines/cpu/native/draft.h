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

}  // namespace

extern "C" {
// Asked with a position (from 1) and the largest probability there, before anything is drawn.
typedef int (*Adviser)(int position, float confidence);

// The same in control/stopping.py, which says what the numbers are and applies them as `advised` does.
struct Stopping {
  const double *edges, *accepted, *follow, *drop_below, *last_below;
  int32_t* bins;   // (room, longest) of the confidence at each position that was asked about, by draft
  int32_t* asked;  // (room,) how many of them
  double reach;    // probability that all up to there are accepted
  int32_t count, longest, room, drafts;
};

// How tokens are chosen; the same in decoder.py.
struct Choice {
  const Cuts* cuts;      // null: the likeliest
  const double* shares;  // (length,) below 1: where in each distribution's mass its token is
  float* probs;          // (length, vocab): the distributions
  Adviser advise;        // or null
  Stopping* stopping;    // instead of it, or null
  int32_t length, vocab; // the most tokens; how many the target knows of
};

int advised(Stopping& s, int position, double confidence) {
  if (position > s.longest) return DROP;
  const int bin = std::upper_bound(s.edges, s.edges + s.count, confidence) - s.edges;
  if (position == 1) s.drafts++;
  const int row = (s.drafts - 1) % s.room;
  s.bins[row * s.longest + position - 1] = bin;
  s.asked[row] = position;
  s.reach = (position > 1 ? s.reach : 1) * s.accepted[bin];
  if (s.reach < s.drop_below[position - 1]) return DROP;
  return position == s.longest || s.reach * s.follow[bin] <= s.last_below[position - 1] ? LAST : MORE;
}

// At most `length` tokens after tokens (n,), into `drafted`; the rest as in `decode`. Says how many, and in `passed` how
// many tokens were added to the caches; -1 where a token is none of the vocabulary.
int draft(const Decoder* decoder, const Choice* choice, const int64_t* tokens, int n, const float* turns,
          float* const* caches, int64_t capacity, int start, int64_t* drafted, int* passed, int threads) {
  const Choice& c = *choice;
  const int64_t vocab = std::min(c.vocab, decoder->head->out);
  float* logits = room<float, 13>(decoder->head->out);
  *passed = 0;
  for (int position = 0; position < c.length; position++) {
    if (!decode(decoder, tokens, n, 1, turns, caches, capacity, start + *passed, logits, threads)) return -1;
    turns += size_t(n) * decoder->attention->turn_stride;
    *passed += n;
    float* probs = c.cuts ? c.probs + position * vocab : nullptr;
    if (probs) probabilities(c.cuts, logits, probs, 1, vocab);
    // Of logits that are no numbers any token: the target will not have it.
    int64_t token = probs ? 0 : std::max<int64_t>(likeliest(logits, vocab), 0);
    int advice = MORE;
    if (c.advise || c.stopping) {
      const float confidence = probs ? largest(probs, vocab) : probability(logits, vocab, logits[token]);
      advice = c.stopping ? advised(*c.stopping, position + 1, confidence) : c.advise(position + 1, confidence);
    }
    if (advice == DROP) return position;
    if (probs) token = std::max<int64_t>(draw(probs, nullptr, vocab, 0, c.shares[position]), 0);
    drafted[position] = token;
    if (advice == LAST) return position + 1;
    tokens = drafted + position;
    n = 1;
  }
  return c.length;
}
}
