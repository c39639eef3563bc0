// Attention of a few new tokens: rotates queries and keys, writes keys and values into the cache, and sums its values
// by weight.
//
// One thread computes a key head: it writes the head's new keys and values, and reads the head's keys and values once
// for all queries that share the head. Both products are GEMMs: queries by keys, which therefore lie in panels of PANEL
// keys like a linear layer's weights, and the resulting weights by values. A query's result does not depend on the
// number of other queries, provided that all values are finite: hidden values are multiplied by zero.

#pragma once

#include "linear.h"

namespace {

// A block of values (this many numbers) stays in the first-level cache while a block of QUERIES queries of a key head reads it.
constexpr int VALUES = 4096, QUERIES = 64;

// The attention of a layer.
struct Attention {
  int32_t heads, key_heads, size;
  bool half;    // caches are bfloat16, else float32
  bool gated;   // a token's row ends with a gate for every query's result
  bool reused;  // another layer has written the keys and values: a row has none
  // Numbers from one token's rotations to the next token's, and where those for keys and for queries begin in them.
  int32_t stride, key_rope, query_rope;
  int32_t window;  // how many of the last tokens a query sees (0: all)
  float scale;
  float softcap;              // bounds the scores to plus and minus this (0: no bound)
  const float* query_weight;  // (size,), multiplies rotated queries; or null
  const float* sinks;         // (heads,), a score for each head that takes a share and has no value; or null

  int row() const { return (heads * (gated ? 2 : 1) + (reused ? 0 : 2 * key_heads)) * size; }
};

// Tokens that form a tree, the nodes of earlier passes first: the parent of each node (-1: the last token held), and
// the number of its ancestors.
struct Tree {
  std::vector<int32_t> parents, depths;
};

// One pass of a layer over the new tokens of a text.
struct Pass {
  const Attention* layer;
  const float* qkv;      // (count, row()): queries, keys, values (and gates); numbers to rotate in pairs
  const float* cos_sin;  // by position, from `start` on, (stride,): of each table (size / 2, 2) cosines and sines
  void* cache;           // (2, key_heads, capacity, size): keys, in panels, and values; capacity a multiple of PANEL
  float* out;            // (count, heads, size)
  int64_t capacity;
  int start, count;  // tokens held before the new ones (and before a tree); new tokens
  const Tree* tree;  // its last `count` nodes are the new tokens; null if each token follows the one before it

  int before() const { return tree ? int(tree->parents.size()) - count : 0; }  // nodes of earlier passes
};

// Multiplies pairs of numbers, as complex numbers, by cosines and sines and by a factor.
inline void rotate(const float* x, const float* cos_sin, int size, float factor, float* out) {
  for (int i = 0; i < size; i += 2) {
    const float a = x[i], b = x[i + 1];
    out[i] = (a * cos_sin[i] - b * cos_sin[i + 1]) * factor;
    out[i + 1] = (a * cos_sin[i + 1] + b * cos_sin[i]) * factor;
  }
}

// Multiplies all rows by WIDTH vectors of outputs; parameters as in `multiply`.
template <int WIDTH, class Number>
void multiply_all(int rows, const Number* w, int step, const float* x, int stride, int inputs, bool first, float* sums, int apart) {
  int row = tile_of<TILE>(rows, [&](auto n) {
    constexpr Fetch FETCH = n >= MANY ? FAR_AHEAD : SOON;
    multiply<n, WIDTH, FETCH>(w, step, x, stride, inputs, first, sums, apart);
  });
  while (row < rows)
    row += tile_of<TILE>(rows - row, [&](auto n) {
      multiply<n, WIDTH, NOTHING>(w, step, x + size_t(row) * stride, stride, inputs, first, sums + size_t(row) * apart, apart);
    });
}

// Turns the scores w of the keys from `from` to `until` into weights that add up to 1, including that of the sink, if
// any. The other weights from `low` to `end` become zero. w must have room for a vector behind `end`.
void softmax(float* w, int low, int from, int until, int end, const float* sink) {
  for (int lane = 0; lane < LANES; lane++) w[until + lane] = -INFINITY;  // allows the loops to use whole vectors
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

// Hides all of a node's scores w of nodes, except those of itself and of its ancestors within its window.
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

// Computes the results `sums` (count, size) of `count` queries of a key head, the first of them number `row`. `sinks`
// are those of the head's queries, or null.
template <class Number>
void see(const Pass& p, int row, int count, const float* sinks, const float* queries, const Number* keys, const Number* values,
         float* sums) {
  const Attention& m = *p.layer;
  const int size = m.size, group = m.heads / m.key_heads, window = m.window, before = p.before();
  const auto node = [&](int i) { return before + (row + i) / group; };
  const auto last = [&](int i) { return p.start + node(i) + 1; };
  // A node's place in the cache is not its position, so `hide_others` applies the window to nodes.
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

// Writes a token's rotated key and its value of a head into their caches at `place`.
template <class Number>
void write_key(const Pass& p, int head, const float* qkv, const float* cos_sin, int place, Number* keys, Number* values) {
  const Attention& m = *p.layer;
  const int size = m.size;
  float* key = scratch<float, 16>(size);
  rotate(qkv + size_t(m.heads + head) * size, cos_sin + m.key_rope, size, 1.0f, key);
  const float* value = qkv + size_t(m.heads + m.key_heads + head) * size;
  Number *in_panel = keys + size_t(place / PANEL) * PANEL * size + place % PANEL, *in_row = values + size_t(place) * size;
  for (int k = 0; k < size; k++) store(key[k], in_panel + size_t(k) * PANEL);
  for (int k = 0; k < size; k++) store(value[k], in_row + k);
}

template <class Number>
void key_head(const Pass& p, int head) {
  const Attention& m = *p.layer;
  const int size = m.size, group = m.heads / m.key_heads, rows = p.count * group, row_stride = m.row();
  Number* keys = (Number*)p.cache + size_t(head) * p.capacity * size;
  Number* values = keys + size_t(m.key_heads) * p.capacity * size;
  float* queries = scratch<float, 3>(size_t(rows) * size);
  float* sums = scratch<float, 4>(size_t(rows) * size);
  for (int i = 0, before = p.before(); i < p.count; i++) {
    const int behind = p.tree ? p.tree->depths[before + i] : i;
    const float *qkv = p.qkv + size_t(i) * row_stride, *cos_sin = p.cos_sin + size_t(behind) * m.stride;
    if (!m.reused) write_key(p, head, qkv, cos_sin, p.start + before + i, keys, values);
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

// Whether attention supports heads of this size.
int attends(int size) { return size > 0 && size % 16 == 0; }

// Runs the passes of several texts through one layer.
void attend(const Pass* passes, int texts, int threads) {
  const int heads = passes->layer->key_heads, parts = texts * heads;
  run(parts > 1 ? threads : 1, [&](int number, int count) {
    const auto compute = [&](auto each) {
      for (int part = number; part < parts; part += count) each(passes[part / heads], part % heads);
    };
    if (passes->layer->half)
      compute(key_head<uint16_t>);
    else
      compute(key_head<float>);
  });
}

}  // namespace
