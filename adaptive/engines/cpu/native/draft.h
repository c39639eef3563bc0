// A whole proposal of a draft in one call: pass, choice, next pass. So nothing else runs between two of its tokens.

#pragma once

#include "decoder.h"
#include "sampling.h"

namespace {

// What to do with a position whose distribution is known; the numbers of Advice in control/policy.py.
enum Advice { DROP, LAST, MORE };

// The probability of the token with the largest logit, `top`.
inline float probability(const float* logits, int64_t count, float top) {
  Vector sums = {};
  float sum = 0;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sums += exponential(at(logits + i) - top);
  for (; i < count; i++) sum += std::exp(logits[i] - top);
  return 1 / (sum + total(sums));
}

// Thresholds that decide about a position (from 1) by the largest probability there, before anything is drawn. They are
// Thresholds of engines/protocol.py; control/stopping.py applies them in Python as `advised` does here.
struct Stopping {
  const double *edges, *accepted, *follow, *drop_below, *last_below;
  int32_t* bins;    // (kept, longest), bins of the confidence at each decided position, by draft
  int32_t* asked;   // (kept,), how many positions of a draft were decided
  int32_t* drafts;  // (1,), the number of drafts so far
  double* reach;    // (1,), the probability that all tokens up to this position are accepted
  int32_t count, longest, kept;
};

// Decides about a position: by thresholds, by a callback, or not at all (both null; then it is MORE).
struct Adviser {
  const Stopping* stopping;
  int (*ask)(void* whom, int position, float confidence);
  void* whom;

  bool any() const { return stopping || ask; }
};

// A callback (or null) for the tokens allowed behind the `count` drafted ones, as in `leave_out` (null: all). It
// returns false to end the draft.
struct Masker {
  bool (*ask)(void* whom, const int64_t* drafted, int count, const uint32_t** allowed);
  void* whom;
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

// How the tokens of a proposal are chosen: at most `length` of the first `known` ids. A token is drawn at the share
// `uniform` (length,) of its distribution's mass; the distributions are left in `probs` (length, known). Greedy or with
// a seed neither is used.
struct Choosing {
  const Sampling* sampling;
  Adviser adviser;
  Masker masker;
  int length;
  int64_t known;
  const double* uniform;
  float* probs;
};

// Counts a proposal that ends at `position` (from 0) without a confidence: the policy counts it, too.
int ended_unasked(const Choosing& c, int position) {
  if (const Stopping* s = c.adviser.stopping; s && !position) {
    const int row = (*s->drafts)++ % s->kept;
    s->asked[row] = 0;
  }
  return DROP;
}

// Decides about `position` (from 0) of a proposal from its logits, and chooses its token, which is number `place` of
// the text. `token` points behind the tokens drafted before it. Logits (vocab,) are of the tokens `ids`, or of the
// first ids if that is null. Grammars and a seed's noise refer to tokens by id, so they are applied to logits spread
// over all ids.
int choose(const Choosing& c, float* logits, const int64_t* ids, int64_t vocab, int position, int place, int64_t* token) {
  const Sampling& sampling = *c.sampling;
  if (!vocab) return ended_unasked(c, position);
  if (ids && (c.masker.ask || sampling.seeded)) {
    float* all = scratch<float, 51>(c.known);
    std::fill_n(all, c.known, -INFINITY);
    for (int64_t i = 0; i < vocab; i++) all[ids[i]] = logits[i];
    return choose(c, all, nullptr, c.known, position, place, token);
  }
  if (c.masker.ask) {
    const uint32_t* allowed = nullptr;
    if (!c.masker.ask(c.masker.whom, token - position, position, &allowed)) return ended_unasked(c, position);
    if (allowed) leave_out(allowed, logits, vocab);
    // All allowed tokens may be outside the draft's vocabulary.
    if (largest(logits, vocab) == -INFINITY) return ended_unasked(c, position);
  }
  float* row = sampling.greedy ? nullptr : sampling.seeded || ids ? scratch<float, 14>(vocab) : c.probs + position * vocab;
  if (row) probabilities(sampling.cuts, logits, row, 1, vocab);
  // If the logits are NaN, any token will do: the target rejects it.
  *token = row ? 0 : std::max<int64_t>(likeliest(logits, vocab), 0);
  int advice = MORE;
  if (c.adviser.any()) {
    const float confidence = row ? largest(row, vocab) : probability(logits, vocab, logits[*token]);
    advice = c.adviser.stopping ? advised(*c.adviser.stopping, position + 1, confidence)
                                : c.adviser.ask(c.adviser.whom, position + 1, confidence);
  }
  if (advice != DROP && row)
    *token = std::max<int64_t>(sampling.seeded ? race(row, vocab, keys_of(sampling.seed, place))
                                               : draw(row, nullptr, vocab, 0, c.uniform[position]), 0);
  if (!ids) return advice;
  *token = ids[*token];
  if (advice != DROP && row) {  // the acceptance rule indexes q by the target's ids
    float* q = c.probs + position * c.known;
    std::fill_n(q, c.known, 0.0f);
    for (int64_t i = 0; i < vocab; i++) q[ids[i]] = row[i];
  }
  return advice;
}

// A proposal for one text: tokens drafted after the `tokens` of `text` (text.rows is 1), into `drafted` (length,).
// Results: how many were drafted (`found`), and how many tokens were appended to the caches (`passed`).
struct Drafting {
  Choosing choosing;
  Text text;
  const int64_t* tokens;
  int64_t* drafted;
  int found, passed;
};

// Makes proposals for `count` texts, token by token: a pass takes all texts whose proposals still go on, so that the
// weights are read once for all. A proposal does not depend on the others. Returns false if a token is outside the
// vocabulary. A head takes one text.
bool draft(const Decoder& decoder, Drafting* all, int count, int threads) {
  const int64_t outputs = decoder.head->out;
  float* logits = scratch<float, 13>(size_t(count) * outputs);
  Drafting** going = scratch<Drafting*, 27>(count);
  Text* texts = scratch<Text, 28>(count);
  int left = 0;
  for (int i = 0; i < count; i++)
    if (all[i].choosing.length > 0) going[left++] = all + i;
  for (int position = 0; left; position++) {
    int n = 0;
    for (int i = 0; i < left; n += going[i++]->text.count) texts[i] = going[i]->text;
    int64_t* tokens = scratch<int64_t, 29>(n);
    for (int i = 0, at = 0; i < left; at += going[i++]->text.count)
      std::copy_n(going[i]->tokens, going[i]->text.count, tokens + at);
    if (!decode(decoder, tokens, texts, left, logits, threads)) return false;
    int still = 0;
    for (int i = 0; i < left; i++) {
      Drafting& d = *going[i];
      Text& text = d.text;
      text.recall = text.recall.behind(text.count);
      text.cos_sin += size_t(text.count) * decoder.stride;
      text.start += text.count;
      d.passed += text.count;
      d.tokens = d.drafted + position;
      const int64_t *ids = decoder.ids, known = d.choosing.known;
      const int64_t vocab = ids ? std::lower_bound(ids, ids + outputs, known) - ids : std::min(known, outputs);
      const int advice = choose(d.choosing, logits + i * outputs, ids, vocab, position, text.start, d.drafted + position);
      text.count = 1;
      if (advice != DROP) d.found = position + 1;
      if (advice == MORE && d.found < d.choosing.length) going[still++] = &d;
    }
    left = still;
  }
  return true;
}

}  // namespace
