// Attention of a few new tokens: rotate queries and keys, write keys and values into the cache, and weigh its values.
//
// A key head is one thread's: it writes that head's new keys and reads the head's keys and values once for all queries
// that share it, block by block. A query's result does not depend on how many others it is computed with.

#pragma once

#include "vectors.h"

namespace {

// Keys or values that many queries of a key head read while they are in the first cache, and how many queries.
constexpr int KEYS = 64, QUERIES = 64;

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

// Half of what x and y hold added to the other half, by parts as LOW and HIGH pick them: half as many sums of x beside half as
// many of y. `across` a vector's quarters (halves, where it has two), and `within` them.
#if defined(__AVX512F__)
template <int LOW, int HIGH>
inline Vector across(Vector x, Vector y) {
  const __m512 a = (__m512)x, b = (__m512)y;
  return (Vector)_mm512_shuffle_f32x4(a, b, LOW) + (Vector)_mm512_shuffle_f32x4(a, b, HIGH);
}
template <int LOW, int HIGH>
inline Vector within(Vector x, Vector y) {
  const __m512 a = (__m512)x, b = (__m512)y;
  return (Vector)_mm512_shuffle_ps(a, b, LOW) + (Vector)_mm512_shuffle_ps(a, b, HIGH);
}
#else
template <int LOW, int HIGH>
inline Vector across(Vector x, Vector y) {
  const __m256 a = (__m256)x, b = (__m256)y;
  return (Vector)_mm256_permute2f128_ps(a, b, LOW) + (Vector)_mm256_permute2f128_ps(a, b, HIGH);
}
template <int LOW, int HIGH>
inline Vector within(Vector x, Vector y) {
  const __m256 a = (__m256)x, b = (__m256)y;
  return (Vector)_mm256_shuffle_ps(a, b, LOW) + (Vector)_mm256_shuffle_ps(a, b, HIGH);
}
#endif

// The sums of LANES vectors, each in its lane, and each added in the same order.
inline Vector totals(Vector* x) {
#if defined(__AVX512F__)
  for (int j : {0, 1, 2, 3, 8, 9, 10, 11}) x[j] = across<0x44, 0xee>(x[j], x[j | 4]);
  for (int j = 0; j < 4; j++) x[j] = across<0x88, 0xdd>(x[j], x[j | 8]);
#else
  for (int j = 0; j < 4; j++) x[j] = across<0x20, 0x31>(x[j], x[j | 4]);
#endif
  return within<0x88, 0xdd>(within<0x44, 0xee>(x[0], x[1]), within<0x44, 0xee>(x[2], x[3]));
}

// Rows whose queries, or sums, are kept in registers.
template <int V>
constexpr int tile_of() {
  return LANES == 8 ? (V <= 4 ? 2 : 1) : V <= 4 ? 4 : V <= 8 ? 2 : 1;
}

// The scores of keys `begin` to `begin` + LANES for the first of so many queries, those behind `last` as if they were it.
template <int V, int R>
int score(const float* queries, int rows, const float* keys, int begin, int last, float* weights, size_t stride) {
  if constexpr (R > 1)
    if (rows < R) return score<V, R - 1>(queries, rows, keys, begin, last, weights, stride);
  constexpr int SIZE = V * LANES;
  Vector q[R][V], sums[R][LANES];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) q[r][v] = at(queries + r * SIZE + v * LANES);
  for (int j = 0; j < LANES; j++) {
    const float* key = keys + size_t(std::min(begin + j, last)) * SIZE;
    for (int r = 0; r < R; r++) sums[r][j] = q[r][0] * at(key);
    for (int v = 1; v < V; v++)
      for (int r = 0; r < R; r++) sums[r][j] += q[r][v] * at(key + v * LANES);
  }
  for (int r = 0; r < R; r++) at(weights + r * stride + begin) = totals(sums[r]);
  return R;
}

// Add the values of keys `begin` to `end`, times their weights, to the sums of the first of so many rows.
template <int V, int R>
int weigh(const float* values, int begin, int end, const float* weights, size_t stride, float* sums, int rows) {
  if constexpr (R > 1)
    if (rows < R) return weigh<V, R - 1>(values, begin, end, weights, stride, sums, rows);
  constexpr int SIZE = V * LANES;
  Vector sum[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = at(sums + r * SIZE + v * LANES);
  for (int key = begin; key < end; key++)
    for (int v = 0; v < V; v++) {
      const Vector value = at(values + size_t(key) * SIZE + v * LANES);
      for (int r = 0; r < R; r++) sum[r][v] += weights[r * stride + key] * value;
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) at(sums + r * SIZE + v * LANES) = sum[r][v];
  return R;
}

// What `count` queries of a key head see, of which the first is `row`; one after the other, each (V * LANES).
template <int V>
void see(const Pass& p, int row, int count, const float* queries, const float* keys, const float* values, float* sums) {
  constexpr int SIZE = V * LANES, TILE_ROWS = tile_of<V>();
  const int group = p.model.heads / p.model.key_heads;
  const auto last = [&](int i) { return p.start + (row + i) / group + 1; };
  const auto first = [&](int i) { return p.window ? std::max(0, last(i) - p.window) : 0; };
  const int low = first(0), end = last(count - 1);
  const size_t stride = end + 2 * LANES;
  float* weights = room<float, 5>(size_t(count) * stride);
  for (int block = low; block < end; block += KEYS)
    for (int i = 0, done; i < count; i += done)
      for (int key = block; key < std::min(block + KEYS, end); key += LANES)
        done = score<V, TILE_ROWS>(queries + i * SIZE, count - i, keys, key, end - 1, weights + i * stride, stride);
  for (int i = 0; i < count; i++) {
    float* w = weights + i * stride;
    const int from = first(i), until = last(i);
    for (int lane = 0; lane < LANES; lane++) w[until + lane] = -INFINITY;  // so that whole vectors can be taken
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
  std::fill(sums, sums + size_t(count) * SIZE, 0.0f);
  for (int block = low; block < end; block += KEYS)
    for (int i = 0; i < count; i += TILE_ROWS) {
      const int some = std::min(TILE_ROWS, count - i), stop = std::min(block + KEYS, end);
      // Keys that all of these queries see, and before and behind them those that some do.
      const int from = std::max(block, first(i + some - 1)), until = std::min(stop, last(i));
      const auto alone = [&](int r, int begin, int end) {
        weigh<V, 1>(values, begin, end, weights + r * stride, stride, sums + r * SIZE, 1);
      };
      for (int r = i; r < i + some; r++) alone(r, std::max(block, first(r)), std::min({from, stop, last(r)}));
      weigh<V, TILE_ROWS>(values, from, until, weights + i * stride, stride, sums + i * SIZE, some);
      for (int r = i; r < i + some; r++) alone(r, std::max(from, until), std::min(stop, last(r)));
    }
}

template <int V>
void key_head(const Pass& p, int head) {
  constexpr int SIZE = V * LANES;
  const Attention& m = p.model;
  const int group = m.heads / m.key_heads, rows = p.count * group, stride = (m.heads + 2 * m.key_heads) * SIZE;
  float* keys = p.cache + size_t(head) * p.capacity * SIZE;
  float* values = keys + size_t(m.key_heads) * p.capacity * SIZE;
  float* queries = room<float, 3>(size_t(rows) * SIZE);
  float* sums = room<float, 4>(size_t(rows) * SIZE);
  for (int i = 0; i < p.count; i++) {
    const float *mixed = p.mixed + size_t(i) * stride, *turns = p.turns + size_t(i) * m.turn_stride;
    rotate(mixed + size_t(m.heads + head) * SIZE, turns, SIZE, 1.0f, keys + size_t(p.start + i) * SIZE);
    std::memcpy(values + size_t(p.start + i) * SIZE, mixed + size_t(m.heads + m.key_heads + head) * SIZE, SIZE * 4);
    for (int g = 0; g < group; g++)
      rotate(mixed + size_t(head * group + g) * SIZE, turns, SIZE, p.scale, queries + size_t(i * group + g) * SIZE);
  }
  for (int row = 0; row < rows; row += QUERIES)
    see<V>(p, row, std::min(QUERIES, rows - row), queries + size_t(row) * SIZE, keys, values, sums + size_t(row) * SIZE);
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
