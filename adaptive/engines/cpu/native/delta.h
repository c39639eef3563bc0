// Gated delta nets over a few new tokens: a short convolution, and for each value head a state that every token decays
// and corrects and its query reads.
//
// A text is cut into chunks of TOKENS, counted from its beginning. With S the state before a chunk, k, q, v and b
// the keys, queries, values and corrections of its tokens, and d(t, j) the product of the decays of the tokens behind j
// up to t (d(t): of all up to t), token t adds to the state its key times its change
//   u_t = b_t (v_t - d(t) k_t S - sum over j < t of d(t, j) (k_t k_j) u_j)
// and its query reads
//   d(t) q_t S + sum over j <= t of d(t, j) (q_t k_j) u_j
// (the chunked form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024).
//
// So a layer stores the state before a chunk (`base`), and the key, decay and change of each token since. A pass only
// reads the base. For tokens behind the end of a chunk it stores the state there in a second place (`ahead`), which
// becomes the base once none of the chunk will be rolled back. So a rollback costs nothing, and neither does the pass
// behind it. Chunks begin at fixed positions, so that a token's result does not depend, bit for bit, on which passes
// brought it and those before it.
//
// One thread computes a key head with the value heads that share it. A state's columns are independent of each other,
// so a few at a time go through a chunk while they are in the first-level cache.

#pragma once

#include "attention.h"

namespace {

// A multiple of LANES. Lower: the base is written more often. Higher: more time for the sums over a chunk's tokens.
constexpr int TOKENS = 16;

// A layer. A token's row of the projection (`outputs`) has queries, keys and values, which go through the convolution,
// then the gate of the heads' results (value heads, value size), then each value head's correction, then each one's
// decay.
struct DeltaNet {
  int32_t key_heads, value_heads, key_size, value_size, kernel;
  const float* convolution;  // (kernel, channels)
  const float *rate, *bias;  // (value heads,): a decay is exp(rate * softplus(given + bias))
  const float* norm;         // (value size,), of a head's result; `eps` as in Prologue
  float eps;

  int group() const { return value_heads / key_heads; }
  int channels() const { return 2 * key_heads * key_size + value_heads * value_size; }
  int outputs() const { return channels() + value_heads * (value_size + 2); }
  // Numbers stored for a chunk: keys (key heads, key size, TOKENS); changes (value heads, value size * TOKENS), in
  // panels of (TOKENS, columns); decays (value heads, TOKENS).
  int chunk() const { return TOKENS * (key_heads * key_size + value_heads * (value_size + 1)); }
};

// Whether there are kernels for heads of these sizes.
int recurs(int key_size, int value_size) {
  return key_size > 0 && value_size > 0 && key_size % 16 == 0 && value_size % 16 == 0;
}

// A text's recurrent states, and how a pass uses them. `memory` has four addresses for each layer: the states `base` and
// `ahead`, both (value heads, key size, value size) in panels of PANEL columns (the rest: of LANES) one after the other;
// the convolution's inputs, (rows, channels), with the token at position p in row p modulo `rows`; and the chunks, (rows /
// TOKENS, chunk). The rows before position 0 are zero.
struct Recall {
  float* const* memory = nullptr;
  int start = 0;       // tokens before the state that the pass begins with, a multiple of TOKENS
  bool ahead = false;  // this state is not `base` but `ahead`
  int length = 0;      // tokens before the pass
  int rows = 0;        // a multiple of TOKENS, for the kernel - 1 tokens before the base and for all behind it
  int settled = 0;     // tokens that will not be rolled back: the base moves behind their last whole chunk

  // For the next pass, behind one over n tokens.
  Recall behind(int n) const {
    Recall next = *this;
    next.length += n;
    const int least = std::max(start, settled / TOKENS * TOKENS);
    const int reached = (next.length - 1) / TOKENS * TOKENS;
    next.start = std::max(least, reached);
    next.ahead = ahead || reached > least;
    return next;
  }
};

// A pass of a text's `count` tokens through a layer: from their rows (count, outputs) to `out` (count, value heads *
// value size).
struct Scan {
  const DeltaNet* net;
  const float* projected;
  float* out;
  int layer, count;
  const Recall* recall;

  // A new token's row of the projection.
  const float* row(int position) const { return projected + size_t(position - recall->length) * net->outputs(); }

  // A token's inputs of the convolution, as they are stored.
  float* stored(int position) const {
    const int row = (position + recall->rows) % recall->rows;
    return recall->memory[size_t(layer) * 4 + 2] + size_t(row) * net->channels();
  }

  // What the convolution makes of a token's channels from `begin` on.
  void convolve(int position, int begin, int channels, float* out) const {
    const float** taps = scratch<const float*, 22>(net->kernel);
    for (int tap = 0; tap < net->kernel; tap++) {
      const int seen = position - net->kernel + 1 + tap;
      taps[tap] = (seen < recall->length ? stored(seen) : row(seen)) + begin;
    }
    const float* weights = net->convolution + begin;
    for (int k = 0; k < channels; k += LANES) {
      Vector sum = {};
      for (int tap = 0; tap < net->kernel; tap++) sum += at(weights + size_t(tap) * net->channels() + k) * at(taps[tap] + k);
      at(out + k) = sum / (1.0f + exponential(-sum));
    }
  }
};

// A chunk in a pass: its tokens up to `place` were there before, and `count` are new.
struct Chunk {
  int begin, place, count;
  bool passed;        // the state behind the chunk is needed; then the chunk is full
  const float* rows;  // (2 * count, key size): the new tokens' keys, then their queries
  float *keys, *changes, *decays;  // what is stored of the chunk, as in DeltaNet, for the key head and its value heads
};

// A value head in a chunk. Products are those of the present token t with d(t, j), see above.
struct Part {
  float weights[2 * TOKENS * TOKENS];          // (2 * count, TOKENS): d(t, j) (k_t k_j), then d(t, j) (q_t k_j)
  float decayed[TOKENS], corrections[TOKENS];  // of the new tokens: d(t) and b_t
  float left;                                  // d(t) of the last token
  const float* moved;                          // (key size, TOKENS): d(last, j) k_j
  const float* values;                         // (count, value size)
  float* read;                                 // (count, value size): the results
};

// Takes WIDTH vectors of the columns of the state `from`, column `begin` and those behind it, through a chunk. `to`: where
// the columns behind the chunk are stored, if they are needed; may be `from`.
template <int WIDTH>
void columns(const DeltaNet& m, const Chunk& c, const Part& p, int begin, const float* from, float* to, float* changes) {
  constexpr int APART = WIDTH * LANES;
  float* sums = scratch<float, 21>(size_t(2) * TOKENS * APART);
  if (c.count) multiply_all<WIDTH>(2 * c.count, from, APART, c.rows, m.key_size, m.key_size, true, sums, APART);
  for (int t = 0; t < c.count; t++) {
    const int j = c.place + t;
    float *known = sums + size_t(t) * APART, *seen = sums + size_t(c.count + t) * APART;
    for (int v = 0; v < APART; v += LANES) {
      at(known + v) *= p.decayed[t];
      at(seen + v) *= p.decayed[t];
    }
    multiply<1, WIDTH, NOTHING>(changes, APART, p.weights + t * TOKENS, TOKENS, j, false, known, APART);
    for (int v = 0; v < APART; v += LANES)
      at(changes + j * APART + v) = (at(p.values + size_t(t) * m.value_size + begin + v) - at(known + v)) * p.corrections[t];
    multiply<1, WIDTH, NOTHING>(changes, APART, p.weights + (c.count + t) * TOKENS, TOKENS, j + 1, false, seen, APART);
    std::memcpy(p.read + size_t(t) * m.value_size + begin, seen, APART * sizeof(float));
  }
  if (!c.passed) return;
  for (int i = 0; i < m.key_size * APART; i += LANES) at(to + i) = at(from + i) * p.left;
  multiply_all<WIDTH>(m.key_size, changes, APART, p.moved, TOKENS, TOKENS, false, to, APART);
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// Computes the decays of a value head's new tokens, and what depends on decays in `part` and `moved`. `dots` (2 * count,
// TOKENS) are the products of the chunk's rows with all its keys.
void weigh(const Scan& s, const Chunk& c, int value_head, const float* dots, float* decays, float* moved, Part& part) {
  const DeltaNet& m = *s.net;
  float left = 1, behind[TOKENS] = {};  // d(t) and d(t, j)
  for (int j = 0; j < c.place + c.count; j++) {
    const int t = j - c.place;
    if (t >= 0) {
      const float* given = s.row(c.begin + j) + m.channels() + m.value_heads * m.value_size + value_head;
      part.corrections[t] = 1 / (1 + std::exp(-given[0]));
      decays[j] = std::exp(m.rate[value_head] * softplus(given[m.value_heads] + m.bias[value_head]));
    }
    left *= decays[j];
    for (int i = 0; i < TOKENS; i++) behind[i] *= decays[j];
    behind[j] = 1;
    if (t < 0) continue;
    part.decayed[t] = left;
    for (int row = t; row < 2 * c.count; row += c.count)
      for (int i = 0; i < TOKENS; i++) part.weights[row * TOKENS + i] = behind[i] * dots[row * TOKENS + i];
  }
  part.left = left;
  part.moved = moved;
  for (int k = 0; c.passed && k < m.key_size; k++)
    for (int i = 0; i < TOKENS; i++) moved[k * TOKENS + i] = behind[i] * c.keys[k * TOKENS + i];
}

// Takes a key head, and the value heads that share it, through a chunk: their states `from` move on to `to`, if needed.
void chunk_head(const Scan& s, const Chunk& c, int head, const float* from, float* to) {
  const DeltaNet& m = *s.net;
  const int group = m.group(), keys = m.key_heads * m.key_size;
  float dots[2 * TOKENS * TOKENS];
  if (c.count) multiply_all<TOKENS / LANES>(2 * c.count, c.keys, TOKENS, c.rows, m.key_size, m.key_size, true, dots, TOKENS);
  float* values = scratch<float, 24>(size_t(TOKENS) * m.value_size);
  float* read = scratch<float, 25>(size_t(TOKENS) * m.value_size);
  float* moved = scratch<float, 22>(size_t(TOKENS) * m.key_size);
  for (int g = 0; g < group; g++) {
    const int value_head = head * group + g;
    Part part;
    weigh(s, c, value_head, dots, c.decays + g * TOKENS, moved, part);
    part.values = values, part.read = read;
    for (int t = 0; t < c.count; t++)
      s.convolve(c.begin + c.place + t, 2 * keys + value_head * m.value_size, m.value_size, values + size_t(t) * m.value_size);
    for (int begin = 0; begin < m.value_size;) {
      const size_t place = (size_t(g) * m.value_size + begin) * m.key_size;
      float* changes = c.changes + (size_t(g) * m.value_size + begin) * TOKENS;
      if (begin + PANEL <= m.value_size) {
        columns<VECTORS>(m, c, part, begin, from + place, to + place, changes);
        begin += PANEL;
      } else {
        columns<1>(m, c, part, begin, from + place, to + place, changes);
        begin += LANES;
      }
    }
    for (int t = 0; t < c.count; t++) {
      const int position = c.begin + c.place + t;
      float* x = read + size_t(t) * m.value_size;
      const float* gate = s.row(position) + m.channels() + size_t(value_head) * m.value_size;
      float* out = s.out + (size_t(position - s.recall->length) * m.value_heads + value_head) * m.value_size;
      const float factor = rms_factor(x, m.value_size, m.eps);
      for (int k = 0; k < m.value_size; k += LANES)
        at(out + k) = at(x + k) * factor * at(m.norm + k) * at(gate + k) / (1.0f + exponential(-at(gate + k)));
    }
  }
}

void delta_head(const Scan& s, int head) {
  const DeltaNet& m = *s.net;
  const Recall& r = *s.recall;
  const int end = r.length + s.count, group = m.group(), keys = m.key_heads * m.key_size;
  float* const* memory = r.memory + size_t(s.layer) * 4;
  const size_t states = size_t(head) * group * m.key_size * m.value_size;
  float* rows = scratch<float, 23>(size_t(2) * TOKENS * m.key_size);
  float *base = memory[0] + states, *ahead = memory[1] + states, *from = r.ahead ? ahead : base;
  for (int begin = r.start; begin < end; begin += TOKENS) {
    const int first = std::max(begin, r.length), count = std::max(0, std::min(begin + TOKENS, end) - first);
    const bool settled = begin + TOKENS <= r.settled, passed = settled || begin + TOKENS < end;
    if (!count && !passed) break;
    float* stored = memory[3] + size_t(begin / TOKENS % (r.rows / TOKENS)) * m.chunk();
    float *changes = stored + size_t(keys) * TOKENS, *decays = changes + size_t(m.value_heads) * m.value_size * TOKENS;
    const Chunk chunk{begin, std::min(first - begin, TOKENS), count, passed, rows, stored + size_t(head) * m.key_size * TOKENS,
                      changes + size_t(head) * group * m.value_size * TOKENS, decays + head * group * TOKENS};
    for (int t = 0; t < count; t++) {
      float *key = rows + size_t(t) * m.key_size, *query = rows + size_t(count + t) * m.key_size;
      const auto normal = [&](float* x, float scale) {
        const float factor = rms_factor(x, m.key_size, 1e-6f) * scale;
        for (int k = 0; k < m.key_size; k += LANES) at(x + k) *= factor;
      };
      s.convolve(first + t, keys + head * m.key_size, m.key_size, key);
      s.convolve(first + t, head * m.key_size, m.key_size, query);
      normal(key, 1);
      normal(query, 1 / std::sqrt(float(m.key_size)));
      for (int k = 0; k < m.key_size; k++) chunk.keys[k * TOKENS + chunk.place + t] = key[k];
    }
    chunk_head(s, chunk, head, from, settled ? base : ahead);
    from = settled ? base : ahead;
  }
  const auto store = [&](int position, int channel, int count) {
    std::memcpy(s.stored(position) + channel, s.row(position) + channel, count * sizeof(float));
  };
  for (int position = std::max(r.length, end - r.rows); position < end; position++) {
    store(position, head * m.key_size, m.key_size);
    store(position, keys + head * m.key_size, m.key_size);
    store(position, 2 * keys + head * group * m.value_size, group * m.value_size);
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
