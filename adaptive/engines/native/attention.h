// Attention of a few new tokens: rotate queries and keys, write keys and values into the cache, and weigh its values.
//
// A key head is one thread's: it writes that head's new keys and reads the head's keys and values once for all queries
// that share it, block by block. A query's result does not depend on how many others it is computed with.

#pragma once

#include "vectors.h"

namespace {

// Keys or values that all queries of a key head read while they are in the first cache.
constexpr int KEYS = 64;

extern "C" {
// A model's attention, and one pass of it; the same in kernels.py.
struct Attention {
  int32_t heads, key_heads, size;
  int32_t turn_stride;  // numbers from a token's rotations to the next token's
};
}

struct Pass {
  const Attention& model;
  const float* mixed;  // (count, heads + 2 * key_heads, size): queries, keys, values; numbers to rotate in pairs
  const float* turns;  // for each token (size / 2, 2): cosine and sine
  float* cache;        // (2, key_heads, capacity, size): keys and values
  float* out;          // (count, heads, size)
  int64_t capacity;
  int start, count, window;  // tokens before the first new one; a query sees the last `window` (0: all)
  float scale;
};

// Pairs of numbers as complex ones, times the turns, times a factor.
inline void rotate(const float* x, const float* turns, int size, float factor, float* out) {
  for (int i = 0; i < size; i += 2) {
    const float a = x[i], b = x[i + 1];
    out[i] = (a * turns[i] - b * turns[i + 1]) * factor;
    out[i + 1] = (a * turns[i + 1] + b * turns[i]) * factor;
  }
}

template <int V>
void key_head(const Pass& p, int head) {
  constexpr int SIZE = V * LANES;
  const Attention& m = p.model;
  const int group = m.heads / m.key_heads, rows = p.count * group, end = p.start + p.count;
  const int stride = (m.heads + 2 * m.key_heads) * SIZE;
  float* keys = p.cache + size_t(head) * p.capacity * SIZE;
  float* values = keys + size_t(m.key_heads) * p.capacity * SIZE;
  float* queries = room<float, 3>(size_t(rows) * SIZE);
  float* sums = room<float, 4>(size_t(rows) * SIZE);
  float* weights = room<float, 5>(size_t(rows) * (end + LANES));
  for (int i = 0; i < p.count; i++) {
    const float *mixed = p.mixed + size_t(i) * stride, *turns = p.turns + size_t(i) * m.turn_stride;
    rotate(mixed + size_t(m.heads + head) * SIZE, turns, SIZE, 1.0f, keys + size_t(p.start + i) * SIZE);
    std::memcpy(values + size_t(p.start + i) * SIZE, mixed + size_t(m.heads + m.key_heads + head) * SIZE, SIZE * 4);
    for (int g = 0; g < group; g++)
      rotate(mixed + size_t(head * group + g) * SIZE, turns, SIZE, p.scale, queries + size_t(i * group + g) * SIZE);
  }
  const auto last = [&](int row) { return p.start + row / group + 1; };
  const auto begin = [&](int row) { return p.window ? std::max(0, last(row) - p.window) : 0; };
  const int low = begin(0);
  for (int block = low; block < end; block += KEYS)
    for (int row = 0; row < rows; row++) {
      Vector q[V];
      for (int v = 0; v < V; v++) q[v] = at(queries + row * SIZE + v * LANES);
      const int until = std::min(block + KEYS, last(row));
      for (int key = block; key < until; key++) {
        Vector sum = q[0] * at(keys + size_t(key) * SIZE);
        for (int v = 1; v < V; v++) sum += q[v] * at(keys + size_t(key) * SIZE + v * LANES);
        weights[size_t(row) * (end + LANES) + key] = total(sum);
      }
    }
  for (int row = 0; row < rows; row++) {
    float* w = weights + size_t(row) * (end + LANES);
    const int from = begin(row), until = last(row);
    for (int i = 0; i < LANES; i++) w[until + i] = -INFINITY;  // so that whole vectors can be taken
    Vector most = Vector{} - INFINITY, sum = {};
    for (int key = from; key < until; key += LANES) most = higher(most, at(w + key));
    float top = most[0];
    for (int lane = 1; lane < LANES; lane++) top = std::max(top, most[lane]);
    for (int key = from; key < until; key += LANES) {
      const Vector x = at(w + key);
      at(w + key) = x == -INFINITY ? Vector{} : exponential(x - top);
      sum += at(w + key);
    }
    const float factor = 1 / total(sum);
    for (int key = from; key < until; key += LANES) at(w + key) *= factor;
  }
  std::fill(sums, sums + size_t(rows) * SIZE, 0.0f);
  for (int block = low; block < end; block += KEYS)
    for (int row = 0; row < rows; row++) {
      const float* w = weights + size_t(row) * (end + LANES);
      Vector sum[V];
      for (int v = 0; v < V; v++) sum[v] = at(sums + row * SIZE + v * LANES);
      const int until = std::min(block + KEYS, last(row));
      for (int key = std::max(block, begin(row)); key < until; key++)
        for (int v = 0; v < V; v++) sum[v] += w[key] * at(values + size_t(key) * SIZE + v * LANES);
      for (int v = 0; v < V; v++) at(sums + row * SIZE + v * LANES) = sum[v];
    }
  for (int row = 0; row < rows; row++)
    std::memcpy(p.out + (size_t(row / group) * m.heads + head * group + row % group) * SIZE, sums + row * SIZE, SIZE * 4);
}

typedef void (*KeyHead)(const Pass&, int);

KeyHead key_head_of(int size) {
  switch (size) {
    case 16: return key_head<16 / LANES>;
    case 32: return key_head<32 / LANES>;
    case 48: return key_head<48 / LANES>;
    case 64: return key_head<64 / LANES>;
    case 80: return key_head<80 / LANES>;
    case 96: return key_head<96 / LANES>;
    case 128: return key_head<128 / LANES>;
    case 256: return key_head<256 / LANES>;
    default: return nullptr;
  }
}

}  // namespace

extern "C" {

// Whether there is attention for heads of this size.
int attends(int size) { return key_head_of(size) != nullptr; }

// Fields as in Pass.
void attend(const Attention* model, const float* mixed, const float* turns, float* cache, float* out, int64_t capacity,
            int start, int count, int window, float scale, int threads) {
  const Pass pass{*model, mixed, turns, cache, out, capacity, start, count, window, scale};
  const KeyHead one = key_head_of(model->size);
  run(model->key_heads > 1 ? threads : 1, [&](int number, int count) {
    for (int head = number; head < model->key_heads; head += count) one(pass, head);
  });
}
}
