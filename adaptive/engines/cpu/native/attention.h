// Attention of a few new tokens: rotate queries and keys, write keys and values into the cache, and weigh its values.
//
// A key head is one thread's: it writes that head's new keys and reads the head's keys and values once for all queries
// that share it. Both are GEMMs: of queries by keys, which therefore lie in panels of PANEL keys as a linear layer's weights
// do, and of what comes of that by values. A query's result does not depend on how many others it is computed with, as
// long as their values are numbers: what a query must not see is multiplied by zero.

#pragma once

#include "linear.h"

namespace {

// Numbers of values that many queries of a key head read while they are in the first cache, and how many queries.
constexpr int VALUES = 4096, QUERIES = 64;

// How a layer attends.
struct Attention {
  int32_t heads, key_heads, size;
  bool gated;   // a token's row ends with a gate for every query, of what it sees
  bool reused;  // keys and values are those that another layer has written: a row has none
  // Numbers from a token's rotations to the next token's, and where among them those of keys and of queries begin.
  int32_t stride, key_rope, query_rope;
  int32_t window;  // a query sees the last so many (0: all)
  float scale;
  float softcap;              // scores are within plus and minus this (0: they are what they are)
  const float* query_weight;  // (size,): of rotated queries; or null
  const float* sinks;         // (heads,): a score of each that takes its share and has no value; or null

  int row() const { return (heads * (gated ? 2 : 1) + (reused ? 0 : 2 * key_heads)) * size; }
};

// Tokens that are a tree, the nodes of earlier passes first: which node each follows (-1: what the cache holds), and how many
// it lies behind.
struct Tree {
  std::vector<int32_t> parents, depths;
};

// One pass of a layer over the new tokens of a text.
struct Pass {
  const Attention* layer;
  const float* qkv;      // (count, row()): queries, keys, values (and gates); numbers to rotate in pairs
  const float* cos_sin;  // by position, from `start` on, (stride,): of each table (size / 2, 2) cosines and sines
  float* cache;          // (2, key_heads, capacity, size): keys, in panels, and values; capacity a multiple of PANEL
  float* out;            // (count, heads, size)
  int64_t capacity;
  int start, count;  // tokens before the first new one
  const Tree* tree;  // whose last `count` nodes are the new tokens, or null where each follows the one before it

  int before() const { return tree ? int(tree->parents.size()) - count : 0; }  // nodes that lie between `start` and the new ones
};

// Pairs of numbers as complex ones, times cosines and sines, times a factor.
inline void rotate(const float* x, const float* cos_sin, int size, float factor, float* out) {
  for (int i = 0; i < size; i += 2) {
    const float a = x[i], b = x[i + 1];
    out[i] = (a * cos_sin[i] - b * cos_sin[i + 1]) * factor;
    out[i + 1] = (a * cos_sin[i + 1] + b * cos_sin[i]) * factor;
  }
}

// All rows multiplied by WIDTH vectors of outputs, as in multiply.
template <int WIDTH>
void multiply_all(int rows, const float* w, int step, const float* x, int stride, int inputs, bool first, float* sums, int apart) {
  int row = tile_of<TILE>(rows, [&](auto n) { multiply<n, WIDTH, true>(w, step, x, stride, inputs, first, sums, apart); });
  while (row < rows)
    row += tile_of<TILE>(rows - row, [&](auto n) {
      multiply<n, WIDTH, false>(w, step, x + size_t(row) * stride, stride, inputs, first, sums + size_t(row) * apart, apart);
    });
}

// Scores of the keys from `from` to `until` to weights that add up to 1, with that of a sink if there is one, and to zero for all
// others that have a place in w (end,), which has room for a vector more.
void softmax(float* w, int low, int from, int until, int end, const float* sink) {
  for (int lane = 0; lane < LANES; lane++) w[until + lane] = -INFINITY;  // so that whole vectors can be taken
  Vector most = Vector{} - INFINITY, sum = {};
  for (int key = from; key < until; key += LANES) most = higher(most, at(w + key));
  float top = most[0];
  for (int lane = 1; lane < LANES; lane++) top = std::max(top, most[lane]);
  if (sink) top = std::max(top, *sink);
  for (int key = from; key < until; key += LANES) {
    const Vector x = at(w + key);
    at(w + key) = x == -INFINITY ? Vector{} : exponential(x - top);
    sum += at(w + key);
  }
  const float factor = 1 / (total(sum) + (sink ? std::exp(*sink - top) : 0.0f));
  for (int key = from; key < until; key += LANES) at(w + key) *= factor;
  std::fill(w + low, w + from, 0.0f);
  if (until < end) std::fill(w + until, w + end, 0.0f);
}

// Of a node's scores w, by node, leaves those of itself and of the nodes that it follows, as far as its window reaches.
void hide_others(const Tree& tree, int node, int window, float* w) {
  const auto followed = [&](const auto& each) {
    for (int at = node; at >= 0 && (!window || tree.depths[node] - tree.depths[at] < window); at = tree.parents[at]) each(at);
  };
  float* seen = scratch<float, 20>(tree.depths[node] + 1);
  int count = 0;
  followed([&](int at) { seen[count++] = w[at]; });
  std::fill(w, w + node + 1, -INFINITY);
  count = 0;
  followed([&](int at) { w[at] = seen[count++]; });
}

// What `count` queries of a key head see, of which the first is `row`; one after the other, each (size,). `sinks` are those of
// its queries, if there are any.
void see(const Pass& p, int row, int count, const float* sinks, const float* queries, const float* keys, const float* values,
         float* sums) {
  const Attention& m = *p.layer;
  const int size = m.size, group = m.heads / m.key_heads, window = m.window, before = p.before();
  const auto node = [&](int i) { return before + (row + i) / group; };
  const auto last = [&](int i) { return p.start + node(i) + 1; };
  // Nodes do not lie where they stand: of them a tree hides what a window does.
  const auto first = [&](int i) {
    if (!window) return 0;
    return std::max(0, p.tree ? std::min(p.start, p.start + p.tree->depths[node(i)] + 1 - window) : last(i) - window);
  };
  int lowest = first(0);
  if (p.tree)
    for (int i = 1; i < count; i++) lowest = std::min(lowest, first(i));
  const int low = lowest / PANEL * PANEL, end = last(count - 1);
  const int stride = (end + PANEL - 1) / PANEL * PANEL + LANES;
  float* weights = scratch<float, 5>(size_t(count) * stride);
  for (int key = low; key < end; key += PANEL)
    multiply_all<VECTORS>(count, keys + size_t(key) * size, PANEL, queries, size, size, true, weights + key, stride);
  for (int i = 0; i < count; i++) {
    float* own = weights + size_t(i) * stride;
    for (int key = low; m.softcap && key < end; key += LANES) at(own + key) = capped(at(own + key), m.softcap);
    if (p.tree) hide_others(*p.tree, node(i), window, own + p.start);
    softmax(own, low, first(i), last(i), end, sinks ? sinks + (row + i) % group : nullptr);
  }
  for (int key = low, block = std::max(1, VALUES / size); key < end; key += block) {
    const int some = std::min(block, end - key);
    const auto outputs = [&](auto width, int begin) {
      multiply_all<width>(count, values + size_t(key) * size + begin, size, weights + key, stride, some, key == low, sums + begin,
                          size);
    };
    int begin = 0;
    for (; begin + PANEL <= size; begin += PANEL) outputs(std::integral_constant<int, VECTORS>(), begin);
    for (; begin < size; begin += LANES) outputs(std::integral_constant<int, 1>(), begin);
  }
}

// Rotates a token's keys and values of a head into the cache, at a `place` of its own.
void write_key(const Pass& p, int head, const float* qkv, const float* cos_sin, int place) {
  const Attention& m = *p.layer;
  const int size = m.size;
  float* keys = p.cache + size_t(head) * p.capacity * size;
  float* values = keys + size_t(m.key_heads) * p.capacity * size;
  float* key = scratch<float, 16>(size);
  rotate(qkv + size_t(m.heads + head) * size, cos_sin + m.key_rope, size, 1.0f, key);
  float* in_panel = keys + size_t(place / PANEL) * PANEL * size + place % PANEL;
  for (int k = 0; k < size; k++) in_panel[size_t(k) * PANEL] = key[k];
  std::memcpy(values + size_t(place) * size, qkv + size_t(m.heads + m.key_heads + head) * size, size * 4);
}

void key_head(const Pass& p, int head) {
  const Attention& m = *p.layer;
  const int size = m.size, group = m.heads / m.key_heads, rows = p.count * group, row_stride = m.row();
  const float* keys = p.cache + size_t(head) * p.capacity * size;
  const float* values = keys + size_t(m.key_heads) * p.capacity * size;
  float* queries = scratch<float, 3>(size_t(rows) * size);
  float* sums = scratch<float, 4>(size_t(rows) * size);
  for (int i = 0, before = p.before(); i < p.count; i++) {
    const int behind = p.tree ? p.tree->depths[before + i] : i;
    const float *qkv = p.qkv + size_t(i) * row_stride, *cos_sin = p.cos_sin + size_t(behind) * m.stride;
    if (!m.reused) write_key(p, head, qkv, cos_sin, p.start + before + i);
    for (int g = 0; g < group; g++) {
      float* query = queries + size_t(i * group + g) * size;
      rotate(qkv + size_t(head * group + g) * size, cos_sin + m.query_rope, size, m.scale, query);
      for (int k = 0; m.query_weight && k < size; k++) query[k] *= m.query_weight[k];
    }
  }
  const float* sinks = m.sinks ? m.sinks + head * group : nullptr;
  for (int row = 0; row < rows; row += QUERIES)
    see(p, row, std::min(QUERIES, rows - row), sinks, queries + size_t(row) * size, keys, values, sums + size_t(row) * size);
  for (int row = 0; row < rows; row++) {
    const int query = head * group + row % group;
    float *out = p.out + (size_t(row / group) * m.heads + query) * size, *seen = sums + size_t(row) * size;
    const float* gate = p.qkv + size_t(row / group) * row_stride + size_t(m.heads + 2 * m.key_heads + query) * size;
    for (int k = 0; m.gated && k < size; k += LANES) at(seen + k) /= 1.0f + exponential(-at(gate + k));
    std::memcpy(out, seen, size * 4);
  }
}

// Whether there is attention for heads of this size.
int attends(int size) { return size > 0 && size % 16 == 0; }

// The passes of so many texts through one layer.
void attend(const Pass* passes, int texts, int threads) {
  const int heads = passes->layer->key_heads, parts = texts * heads;
  run(parts > 1 ? threads : 1, [&](int number, int count) {
    for (int part = number; part < parts; part += count) key_head(passes[part / heads], part % heads);
  });
}

}  // namespace
