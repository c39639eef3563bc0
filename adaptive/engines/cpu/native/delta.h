// Gated delta nets over a few new tokens: a short convolution, and for each value head a state that every token decays
// and corrects and its query reads.
//
// A pass that may be rolled back does not overwrite a text's state. A layer stores the state some tokens ago (`base`)
// and the inputs since (`log`). The next pass reads the state once, applies the logged tokens that remain, writes the
// state once, and continues with its own tokens on the copy in a processor cache. So a rollback costs nothing. Passes
// over single tokens, which would apply the same logged tokens again and again, also store the current state (`now`).
//
// One thread computes a key head with the value heads that share it. A state's columns are independent of each other,
// so a few at a time go through all tokens while they are in the first-level cache.

#pragma once

#include "linear.h"

namespace {

// A layer. A token's row of the projection (`outputs`) has queries, keys and values, which go through the convolution,
// then the gate of the heads' results (value heads, value size), then each value head's correction, then each one's
// decay.
struct DeltaNet {
  int32_t key_heads, value_heads, key_size, value_size, kernel;
  const float* convolution;  // (kernel, channels)
  const float *rate, *bias;  // (value heads,): a decay is exp(rate * softplus(given + bias))
  const float* norm;         // (value size,), of a head's result; `eps` as in Prologue
  float eps;

  int channels() const { return 2 * key_heads * key_size + value_heads * value_size; }
  int outputs() const { return channels() + value_heads * (value_size + 2); }
  int row() const { return channels() + 2 * value_heads; }  // of the log: the convolution's inputs, decays, corrections
};

// Whether there are kernels for heads of these sizes.
int recurs(int key_size, int value_size) { return key_size > 0 && value_size > 0 && key_size % 16 == 0 && value_size % 16 == 0; }

// A text's recurrent states, and how a pass uses them. `memory` has three addresses for each layer: the states `base`
// and `now`, both (value heads, key size, value size) in panels of PANEL columns (the rest: of LANES) one after the
// other; and the `log` (kernel - 1 + tokens, row), which begins with the kernel - 1 tokens before the base.
struct Recall {
  float* const* memory = nullptr;
  int held = 0;         // logged tokens behind the base
  bool current = false; // `now` is the state after these tokens, so they need not be applied
  bool commit = false;  // move the base behind these tokens, and begin the log again
  bool store = false;   // store the state after the pass in `now`
  bool log = true;      // log the pass's tokens

  // For a single token behind a pass over n tokens that was stored and logged.
  Recall behind(int n) const { return {memory, (commit ? 0 : held) + n, true, false, true, true}; }
};

// A pass of a text's `count` tokens through a layer: from their rows (count, outputs) to `out` (count, value heads *
// value size).
struct Scan {
  const DeltaNet* net;
  const float* projected;
  float* out;
  int layer, count;
  const Recall* recall;
};

// The inputs of a state's columns for a token.
struct Step {
  const float *key, *query;  // (key size,); the query of a replayed token is not used
  const float* value;        // (value size,)
  float decay, correction;
};

// Takes WIDTH vectors of a state's columns, from column `begin` on, through all steps. The results of the queries from
// step `first` on go to `read` (steps, value size). The state is read `from`, and copied to `before` in front of step
// `first` and to `after` behind the last step, each unless null.
template <int WIDTH>
void columns(const Step* steps, int count, int first, int key_size, int value_size, int begin, const float* from, float* before,
             float* after, float* read) {
  constexpr int APART = WIDTH * LANES;
  const size_t bytes = size_t(key_size) * APART * sizeof(float);
  float* state = scratch<float, 21>(size_t(key_size) * APART);
  Vector known[WIDTH] = {};  // the state's value for the next key
  for (int i = 0; i < key_size; i++)
    for (int v = 0; v < WIDTH; v++) {
      const Vector x = at(from + size_t(i) * APART + v * LANES);
      at(state + size_t(i) * APART + v * LANES) = x;
      if (count) known[v] += x * steps[0].key[i];
    }
  for (int t = 0; t < count; t++) {
    if (t == first && before) std::memcpy(before, state, bytes);
    const Step& step = steps[t];
    const float *key = step.key, *query = step.query, *next = steps[std::min(t + 1, count - 1)].key, decay = step.decay;
    Vector change[WIDTH], seen[WIDTH] = {};
    for (int v = 0; v < WIDTH; v++) {
      change[v] = (at(step.value + begin + v * LANES) - known[v] * decay) * step.correction;
      known[v] = Vector{};
    }
    const auto pass = [&](auto reads) {
      for (int i = 0; i < key_size; i++)
        for (int v = 0; v < WIDTH; v++) {
          float* place = state + size_t(i) * APART + v * LANES;
          const Vector x = at(place) * decay + change[v] * key[i];
          at(place) = x;
          if (reads) seen[v] += x * query[i];
          known[v] += x * next[i];
        }
    };
    if (t < first) {
      pass(std::false_type());
      continue;
    }
    pass(std::true_type());
    for (int v = 0; v < WIDTH; v++) at(read + size_t(t - first) * value_size + begin + v * LANES) = seen[v];
  }
  if (first == count && before) std::memcpy(before, state, bytes);
  if (after) std::memcpy(after, state, bytes);
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

void delta_head(const Scan& s, int head) {
  const DeltaNet& m = *s.net;
  const Recall& r = *s.recall;
  float* const* memory = r.memory + size_t(s.layer) * 3;
  float *base = memory[0], *now = memory[1], *log = memory[2];
  const int before = m.kernel - 1, replayed = r.current ? 0 : r.held, all = replayed + s.count, group = m.value_heads / m.key_heads;
  const int channels = m.channels(), keys = m.key_heads * m.key_size, row = m.row();
  // The convolution's input for token t, counted from the first new one; negative t are logged tokens.
  const auto given = [&](int t) {
    return t < 0 ? log + size_t(before + r.held + t) * row : s.projected + size_t(t) * m.outputs();
  };
  const auto convolve = [&](int t, int begin, int size, float* out) {
    for (int k = begin; k < begin + size; k += LANES, out += LANES) {
      Vector sum = {};
      for (int tap = 0; tap <= before; tap++) sum += at(m.convolution + size_t(tap) * channels + k) * at(given(t - before + tap) + k);
      at(out) = sum / (1.0f + exponential(-sum));
    }
  };
  const auto normal = [&](float* x, float scale) {
    const float factor = rms_factor(x, m.key_size, 1e-6f) * scale;
    for (int k = 0; k < m.key_size; k += LANES) at(x + k) *= factor;
  };
  Step* steps = scratch<Step, 22>(all);
  float* vectors = scratch<float, 23>(size_t(all) * (2 * m.key_size + m.value_size));
  float* read = scratch<float, 24>(size_t(s.count) * m.value_size);
  float* gates = scratch<float, 25>(size_t(s.count) * group * 2);
  for (int i = 0; i < all; i++) {
    float *query = vectors + size_t(i) * 2 * m.key_size, *key = query + m.key_size;
    convolve(i - replayed, keys + head * m.key_size, m.key_size, key);
    normal(key, 1);
    if (i >= replayed) {  // replayed tokens need no query
      convolve(i - replayed, head * m.key_size, m.key_size, query);
      normal(query, 1 / std::sqrt(float(m.key_size)));
    }
    steps[i].query = query, steps[i].key = key;
  }
  float* values = vectors + size_t(all) * 2 * m.key_size;
  for (int g = 0; g < group; g++) {
    const int value_head = head * group + g, place = 2 * keys + value_head * m.value_size;
    for (int i = 0; i < all; i++) {
      const int t = i - replayed;
      convolve(t, place, m.value_size, values + size_t(i) * m.value_size);
      steps[i].value = values + size_t(i) * m.value_size;
      if (t < 0) {
        steps[i].decay = given(t)[channels + value_head];
        steps[i].correction = given(t)[channels + m.value_heads + value_head];
        continue;
      }
      const float* of = given(t) + channels + m.value_heads * m.value_size + value_head;
      float* gate = gates + size_t(t * group + g) * 2;
      gate[0] = steps[i].decay = std::exp(m.rate[value_head] * softplus(of[m.value_heads] + m.bias[value_head]));
      gate[1] = steps[i].correction = 1 / (1 + std::exp(-of[0]));
    }
    for (int begin = 0; begin < m.value_size;) {
      const size_t at_head = (size_t(value_head) * m.value_size + begin) * m.key_size;
      const float* from = (r.current ? now : base) + at_head;
      float *left = r.commit ? base + at_head : nullptr, *after = r.store ? now + at_head : nullptr;
      if (begin + PANEL <= m.value_size) {
        columns<VECTORS>(steps, all, replayed, m.key_size, m.value_size, begin, from, left, after, read);
        begin += PANEL;
      } else {
        columns<1>(steps, all, replayed, m.key_size, m.value_size, begin, from, left, after, read);
        begin += LANES;
      }
    }
    for (int t = 0; t < s.count; t++) {
      float* x = read + size_t(t) * m.value_size;
      const float* gate = given(t) + channels + size_t(value_head) * m.value_size;
      float* out = s.out + (size_t(t) * m.value_heads + value_head) * m.value_size;
      const float factor = rms_factor(x, m.value_size, m.eps);
      for (int k = 0; k < m.value_size; k += LANES)
        at(out + k) = at(x + k) * factor * at(m.norm + k) * at(gate + k) / (1.0f + exponential(-at(gate + k)));
    }
  }
  // Copies this head's numbers of a row into the log. A logged row only moves to a place before it, or stays.
  const auto copy = [&](const float* from, float* to) {
    if (from == to) return;
    const auto some = [&](int begin, int count) { std::memcpy(to + begin, from + begin, count * sizeof(float)); };
    some(head * m.key_size, m.key_size);
    some(keys + head * m.key_size, m.key_size);
    some(2 * keys + head * group * m.value_size, group * m.value_size);
  };
  if (!r.log) {
    for (int j = 0; j < before; j++) copy(given(s.count - before + j), log + size_t(j) * row);
    return;
  }
  const int place = before + (r.commit ? 0 : r.held);
  if (r.commit)
    for (int j = 0; j < before; j++) copy(given(j - before), log + size_t(j) * row);
  for (int t = 0; t < s.count; t++) {
    float* to = log + size_t(place + t) * row;
    copy(given(t), to);
    for (int g = 0; g < group; g++)
      for (int part = 0; part < 2; part++)
        to[channels + part * m.value_heads + head * group + g] = gates[size_t(t * group + g) * 2 + part];
  }
}

// Runs the passes of several texts through one layer.
void recur(const Scan* scans, int texts, int threads) {
  const int heads = scans->net->key_heads, parts = texts * heads;
  run(parts > 1 ? threads : 1, [&](int number, int count) {
    for (int part = number; part < parts; part += count) delta_head(scans[part / heads], part % heads);
  });
}

}  // namespace
