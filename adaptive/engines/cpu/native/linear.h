// Linear layers, y = (prologue(x) * transposed(weight) + bias) * factor, for a few rows of x: GEMVs and narrow GEMMs at the speed of
// the memory that the weight lies in.
//
// A weight (out, in) is cut into panels of PANEL outputs. A panel holds, for one input after the other (bfloat16: for
// one pair of inputs after the other), the weights of all its outputs: a thread reads its panels from the first byte
// to the last, in one stream, which is what a processor fetches ahead. Every number of x is spread over a vector
// and multiplied into sums that stay in registers, TILE rows at a time.
//
// A sum's terms are added in the order of the inputs, however many rows there are: a token's result does not depend on
// how many others it is computed with.

#pragma once

#include "pool.h"
#include "vectors.h"

namespace {

constexpr int VECTORS = 2;
constexpr int PANEL = LANES * VECTORS;
// Rows whose sums fit into the registers beside a panel's weights: of 32, or of 16.
#if defined(__AVX512F__)
constexpr int TILE = 12;
#else
constexpr int TILE = 6;
#endif
// Inputs of a panel that more rows than a tile take in turn, while these weights are in a cache.
constexpr int BLOCK = 1024;
#if defined(__AMX_BF16__)
// Of bfloat16 weights that many inputs, times half of a panel's outputs, fill one of the processor's tiles, and at most so many rows.
constexpr int TILE_INPUTS = 32, TILE_ROWS = 16;
// The same as BLOCK, for rows in tiles. Fewer load and store sums more often, more leave the second cache.
constexpr int TILE_BLOCK = 1024;
#endif

// Inputs to a multiple of which a weight is filled up with zeros, by the bytes of its numbers.
constexpr int filled_to(int bytes) {
#if defined(__AMX_BF16__)
  if (bytes == 2) return TILE_INPUTS;
#endif
  return 4 / bytes;
}

// A linear layer.
struct Linear {
  const void* weight;
  const float* bias;       // (out,), or null
  const float* scales;     // (out,), for INT8: what an output's weights are multiples of
  const int32_t* sums;     // (out,), for INT8: of an output's weights
  int32_t in, out;
  int32_t dtype;
  float factor;            // of all outputs
};

// Of weights. INT8 lies in groups of four inputs, as BFLOAT16 does in pairs.
enum DType { FLOAT32, BFLOAT16, INT8 };

// What is done to a row of x before it is multiplied. RMS_NORM: divided by sqrt(sum(x ** 2) + eps) and multiplied by `norm` (in,).
// SILU_GATE: its first half, x * sigmoid(x), times its second. GELU_GATE: the same, with GELU as approximated by tanh.
// SQUARED_RELU: max(x, 0) ** 2, without a gate. CLAMPED_GATE: `norm` is alpha and a limit; the first half, at most the limit,
// x * sigmoid(alpha * x), times the second, within plus and minus the limit, plus 1.
enum Prologue { NONE, RMS_NORM, SILU_GATE, GELU_GATE, SQUARED_RELU, CLAMPED_GATE };

struct Call {
  const Linear& linear;
  const float* x;
  float* y;
  int rows, add, prologue;
  const float* norm;
  float eps;
};

// What x is divided by in an RMS norm, as a factor.
inline float rms_factor(const float* x, int count, float eps) {
  Vector squares = {};
  int k = 0;
  for (; k + LANES <= count; k += LANES) squares += at(x + k) * at(x + k);
  for (; k < count; k++) eps += x[k] * x[k];
  return 1 / std::sqrt(eps + total(squares));
}

// GELU(x) is x * sigmoid of this, but for 1e-3.
template <class Number>
inline Number gelu_argument(Number x) {
  return 1.59576912f * (x + 0.044715f * x * x * x);
}

// A row of x after the prologue, (in,): in `out`, or where it lies if there is none.
const float* after_prologue(const Call& call, int row, float* out) {
  const int in = call.linear.in;
  int k = 0;
  if (call.prologue == NONE) return call.x + size_t(row) * in;
  if (call.prologue == RMS_NORM) {
    const float* x = call.x + size_t(row) * in;
    const float factor = rms_factor(x, in, call.eps);
    for (; k < in; k++) out[k] = x[k] * factor * call.norm[k];
    return out;
  }
  if (call.prologue == SQUARED_RELU) {
    const float* x = call.x + size_t(row) * in;
    for (; k < in; k++) out[k] = x[k] > 0 ? x[k] * x[k] : 0.0f;
    return out;
  }
  const float *gate = call.x + size_t(row) * 2 * in, *up = gate + in;
  if (call.prologue == SILU_GATE) {
    for (; k + LANES <= in; k += LANES) at(out + k) = at(gate + k) * at(up + k) / (1.0f + exponential(-at(gate + k)));
    for (; k < in; k++) out[k] = gate[k] * up[k] / (1.0f + std::exp(-gate[k]));
  } else if (call.prologue == CLAMPED_GATE) {
    const float alpha = call.norm[0], limit = call.norm[1];
    const Vector most = Vector{} + limit;
    for (; k + LANES <= in; k += LANES) {
      const Vector x = lower(at(gate + k), most);
      at(out + k) = x / (1.0f + exponential(-x * alpha)) * (lower(higher(at(up + k), -most), most) + 1.0f);
    }
    for (; k < in; k++) {
      const float x = std::min(gate[k], limit);
      out[k] = x / (1 + std::exp(-x * alpha)) * (std::min(std::max(up[k], -limit), limit) + 1);
    }
  } else {
    for (; k + LANES <= in; k += LANES)
      at(out + k) = at(gate + k) * at(up + k) / (1.0f + exponential(-gelu_argument<Vector>(at(gate + k))));
    for (; k < in; k++) out[k] = gate[k] * up[k] / (1.0f + std::exp(-gelu_argument(gate[k])));
  }
  return out;
}

// As the kernels take it, and what the result has to be multiplied by: numbers, or where the processor multiplies
// pairs of bfloat16, those, or for int8 weights whole numbers up to 127, or where it multiplies only such without a
// sign, 128 more.
inline float convert(const float* x, int count, float* out) {
  std::memcpy(out, x, count * sizeof(float));
  return 1;
}

#if defined(__AVX512F__)
inline __mmask16 lanes(int count) { return count < LANES ? (1u << count) - 1 : 0xffff; }
#endif

#if defined(__AVX512BF16__)
typedef uint16_t Narrow;

inline float convert(const float* x, int count, Narrow* out) {
  for (int k = 0; k < count; k += LANES) {
    const __mmask16 mask = lanes(count - k);
    _mm256_mask_storeu_epi16(out + k, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + k)));
  }
  return 1;
}
#else
typedef float Narrow;
#endif

#if defined(__AVX512VNNI__)
typedef uint8_t Whole;
constexpr int ZERO = 128;  // what stands for zero

inline float convert(const float* x, int count, Whole* out) {
  __m512 most = _mm512_setzero_ps();
  for (int k = 0; k < count; k += LANES)
    most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes(count - k), x + k)));
  const float scale = std::max(_mm512_reduce_max_ps(most), 1e-30f) / 127;
  for (int k = 0; k < count; k += LANES) {
    const __mmask16 mask = lanes(count - k);
    const __m512 steps = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + k), _mm512_set1_ps(1 / scale));
    const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(steps), _mm512_set1_epi32(ZERO));
    _mm_mask_storeu_epi8(out + k, mask, _mm512_cvtepi32_epi8(whole));
  }
  return scale;
}
#else
typedef int8_t Whole;
constexpr int ZERO = 0;

inline float convert(const float* x, int count, Whole* out) {
  Vector most = {};
  float top = 1e-30f;
  int k = 0;
  for (; k + LANES <= count; k += LANES) most = higher(most, higher(at(x + k), -at(x + k)));
  for (; k < count; k++) top = std::max(top, std::abs(x[k]));
  for (int lane = 0; lane < LANES; lane++) top = std::max(top, most[lane]);
  const float scale = top / 127, steps = 1 / scale;
  for (k = 0; k + LANES <= count; k += LANES) {
    const __m256i whole = _mm256_cvtps_epi32((__m256)(at(x + k) * steps));
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)(out + k), _mm_packs_epi16(pairs, pairs));
  }
  for (; k < count; k++) out[k] = Whole(std::lrint(x[k] * steps));
  return scale;
}
#endif

// All rows, (rows, stride), with nothing behind the inputs, and the factors of their results (rows,).
template <class Input>
const Input* prepare(const Call& call, int padded, int stride, float* factors) {
  const int in = call.linear.in;
  float* row_done = scratch<float, 0>(in);
  Input* inputs = scratch<Input, 1>(size_t(call.rows) * stride);
  for (int row = 0; row < call.rows; row++) {
    Input* out = inputs + size_t(row) * stride;
    factors[row] = convert(after_prologue(call, row, row_done), in, out);
    for (int k = in; k < padded; k++) out[k] = 0;  // the weights there are zero, too
  }
  return inputs;
}

// Bytes behind a step's weights from which the memory is asked for those of a later one. Without, processors fetch ahead by
// themselves, but on some not while they compute, and not beyond a page.
constexpr int AHEAD = 4096;

inline void fetch(const void* w) {
  constexpr int LINE = 64;
  for (int at = 0; at < PANEL * 4; at += LINE) _mm_prefetch((const char*)w + AHEAD + at, _MM_HINT_T0);
}

// Sums of ROWS rows by WIDTH vectors of outputs over the next `inputs`, whose weights lie `step` numbers apart: they go on from
// `sums`, whose rows lie `apart`, or from zero where `first`. FETCH: the weights come from memory.
template <int ROWS, int WIDTH, bool FETCH>
inline void multiply(const float* w, int step, const float* x, int stride, int inputs, bool first, float* sums, int apart) {
  Vector acc[ROWS][WIDTH];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < WIDTH; v++) acc[r][v] = first ? Vector{} : at(sums + size_t(r) * apart + v * LANES);
  for (int k = 0; k < inputs; k++, w += step) {
    if (FETCH) fetch(w);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < WIDTH; v++) acc[r][v] += at(w + v * LANES) * x[size_t(r) * stride + k];
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < WIDTH; v++) at(sums + size_t(r) * apart + v * LANES) = acc[r][v];
}

// The same of a panel, with sums (ROWS, PANEL).
template <int ROWS, bool FETCH>
inline void tile(const float* w, const float* x, int stride, int inputs, bool first, float* sums) {
  multiply<ROWS, VECTORS, FETCH>(w, PANEL, x, stride, inputs, first, sums, PANEL);
}

template <int ROWS, bool FETCH>
inline void tile(const uint16_t* w, const Narrow* x, int stride, int inputs, bool first, float* sums) {
#if defined(__AVX512BF16__)
  __m512 acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) acc[r][v] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * PANEL + v * LANES);
  for (int k = 0; k < inputs; k += 2, w += 2 * PANEL) {
    if (FETCH) fetch(w);
    __m512bh weights[VECTORS];
    for (int v = 0; v < VECTORS; v++) weights[v] = (__m512bh)_mm512_loadu_si512(w + v * 2 * LANES);
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      std::memcpy(&pair, x + size_t(r) * stride + k, 4);
      for (int v = 0; v < VECTORS; v++)
        acc[r][v] = _mm512_dpbf16_ps(acc[r][v], weights[v], (__m512bh)_mm512_set1_epi32(pair));
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(sums + r * PANEL + v * LANES, acc[r][v]);
#else
  Vector acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) acc[r][v] = first ? Vector{} : at(sums + r * PANEL + v * LANES);
  for (int k = 0; k < inputs; k += 2, w += 2 * PANEL) {
    if (FETCH) fetch(w);
    Vector weights[VECTORS];
    for (int v = 0; v < VECTORS; v++) weights[v] = (Vector)(*(const Words*)(w + v * 2 * LANES) << 16);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) acc[r][v] += weights[v] * x[size_t(r) * stride + k];
    for (int v = 0; v < VECTORS; v++) weights[v] = (Vector)(*(const Words*)(w + v * 2 * LANES) & 0xffff0000u);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) acc[r][v] += weights[v] * x[size_t(r) * stride + k + 1];
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) at(sums + r * PANEL + v * LANES) = acc[r][v];
#endif
}

#if defined(__AVX512F__)
typedef __m512i Wholes;
#else
typedef __m256i Wholes;
#endif

inline Wholes wholes(const void* from) {
  Wholes loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

// The sums of products of four inputs, `four` times, with every lane's four weights added to its sum.
inline Wholes add_products(Wholes sum, int32_t four, Wholes weights) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(four), weights);
#else
  // Without signs on the one side: sums of two products are then at most 2 * 127 * 127, which 16 bits hold.
  const __m256i x = _mm256_set1_epi32(four);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(weights, x));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

template <int ROWS, bool FETCH>
inline void tile(const int8_t* w, const Whole* x, int stride, int inputs, bool first, int32_t* sums) {
  Wholes acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) acc[r][v] = first ? Wholes{} : wholes(sums + r * PANEL + v * LANES);
  for (int k = 0; k < inputs; k += 4, w += 4 * PANEL) {
    if (FETCH) fetch(w);
    Wholes weights[VECTORS];
    for (int v = 0; v < VECTORS; v++) weights[v] = wholes(w + v * 4 * LANES);
    for (int r = 0; r < ROWS; r++) {
      int32_t four;
      std::memcpy(&four, x + size_t(r) * stride + k, 4);
      for (int v = 0; v < VECTORS; v++) acc[r][v] = add_products(acc[r][v], four, weights[v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) std::memcpy(sums + r * PANEL + v * LANES, &acc[r][v], sizeof(Wholes));
}

// Call `tile` with the number of the first of so many rows, as a constant of at most ROWS, and say it.
template <int ROWS, class Tile>
inline int tile_of(int rows, const Tile& tile) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return tile_of<ROWS - 1>(rows, tile);
  tile(std::integral_constant<int, ROWS>());
  return ROWS;
}

inline int64_t panels_of(const Linear& p) { return (p.out + PANEL - 1) / PANEL; }

// The sums (rows, PANEL) of a panel, to the end of the row in `y`.
template <class Sum>
inline void finish(const Call& call, int64_t panel, const Sum* sums, const float* factors) {
  const Linear& p = call.linear;
  const int begin = int(panel) * PANEL, width = std::min(PANEL, p.out - begin);
  for (int row = 0; row < call.rows; row++) {
    float* y = call.y + size_t(row) * p.out + begin;
    const Sum* sum = sums + size_t(row) * PANEL;
    for (int i = 0; i < width; i++) {
      const float whole = p.scales ? (sum[i] - ZERO * p.sums[begin + i]) * p.scales[begin + i] * factors[row] : sum[i];
      y[i] = (call.add ? y[i] : 0.0f) + p.factor * (whole + (p.bias ? p.bias[begin + i] : 0.0f));
    }
  }
}

#if defined(__AMX_BF16__)
// What was written to memory before is there for tiles to be loaded: the compiler does not know that they read it.
inline void written(const void* memory) { __asm__ volatile("" ::"r"(memory) : "memory"); }

// The processor's tiles: 0 to 3 hold sums, of one tile of rows and then of another, of either half of a panel; 4 and 5 their rows
// of x, 6 and 7 the halves' weights, which lie in a panel as a tile wants them.
struct Tiles {
  uint8_t palette = 1, begin = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  explicit Tiles(int rows_of_x) {
    for (int i = 0; i < 8; i++) bytes[i] = 64, rows[i] = uint8_t(i < 6 ? rows_of_x : TILE_INPUTS / 2);
    written(this);
    _tile_loadconfig(this);
  }
  ~Tiles() { _tile_release(); }
};

// As `prepare` does it, in tiles of so many `rows` and TILE_INPUTS inputs: the numbers of a tile lie together, and behind each
// other the tiles of the same rows. Were each row by itself, a processor would have to fetch ahead in as many streams.
const uint16_t* prepare_tiles(const Call& call, int tiles, int rows, int padded) {
  const int in = call.linear.in;
  float* row_done = scratch<float, 0>(in);
  Narrow* narrow = scratch<Narrow, 30>(padded);
  Narrow* inputs = scratch<Narrow, 1>(size_t(tiles) * rows * padded);
  for (int k = in; k < padded; k++) narrow[k] = 0;  // the weights there are zero, too
  for (int row = 0; row < call.rows; row++) {
    convert(after_prologue(call, row, row_done), in, narrow);
    Narrow* out = inputs + size_t(row / rows) * rows * padded + row % rows * TILE_INPUTS;
    for (int k = 0; k < padded; k += TILE_INPUTS) std::memcpy(out + size_t(k) * rows, narrow + k, TILE_INPUTS * sizeof(Narrow));
  }
  written(inputs);
  return inputs;
}

// As `tile` does it, for one or TWO tiles of so many rows, of which the second lies `apart` numbers behind the first.
template <bool TWO, bool FETCH>
inline void multiply_tiles(const uint16_t* w, const uint16_t* x, size_t apart, int rows, int inputs, bool first, float* sums) {
  constexpr int BETWEEN = PANEL * sizeof(float);  // bytes from one pair of inputs, or row of sums, to the next
  constexpr int ROW = TILE_INPUTS * sizeof(uint16_t);
  float* more = sums + size_t(rows) * PANEL;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, BETWEEN);
    _tile_loadd(1, sums + LANES, BETWEEN);
    if constexpr (TWO) {
      _tile_loadd(2, more, BETWEEN);
      _tile_loadd(3, more + LANES, BETWEEN);
    }
  }
  for (int k = 0; k < inputs; k += TILE_INPUTS, w += TILE_INPUTS * PANEL) {
    if (FETCH)
      for (int pair = 0; pair < TILE_INPUTS / 2; pair++) fetch(w + pair * 2 * PANEL);
    _tile_loadd(4, x + size_t(k) * rows, ROW);
    _tile_loadd(6, w, BETWEEN);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 2 * LANES, BETWEEN);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TWO) {
      _tile_loadd(5, x + apart + size_t(k) * rows, ROW);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, BETWEEN);
  _tile_stored(1, sums + LANES, BETWEEN);
  if constexpr (TWO) {
    _tile_stored(2, more, BETWEEN);
    _tile_stored(3, more + LANES, BETWEEN);
  }
}

// multiply_panels for bfloat16, by tiles whatever the number of rows: a tile adds in another order than vectors do.
void multiply_panels_by_tiles(const Call& call, int64_t first, int64_t last) {
  const Linear& p = call.linear;
  const int padded = (p.in + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
  const int tiles = (call.rows + TILE_ROWS - 1) / TILE_ROWS, rows = (call.rows + tiles - 1) / tiles;
  const int block = tiles > 2 ? TILE_BLOCK : padded;
  const size_t apart = size_t(rows) * padded;
  const uint16_t* x = prepare_tiles(call, tiles, rows, padded);
  float* sums = scratch<float, 3>(size_t(tiles) * rows * PANEL);
  const Tiles shapes(rows);
  for (int64_t panel = first; panel < last; panel++) {
    const uint16_t* w = (const uint16_t*)p.weight + size_t(panel) * padded * PANEL;
    for (int k = 0; k < padded; k += block)
      for (int tile = 0; tile < tiles; tile += 2) {
        const int inputs = std::min(block, padded - k);
        const auto some = [&](auto two, auto fetches) {
          multiply_tiles<two, fetches>(w + size_t(k) * PANEL, x + tile * apart + size_t(k) * rows, apart, rows, inputs, k == 0,
                                       sums + size_t(tile) * rows * PANEL);
        };
        const std::true_type yes;
        const std::false_type no;
        const bool two = tile + 1 < tiles;
        if (tile)
          two ? some(yes, no) : some(no, no);  // the weights are in a cache by now
        else
          two ? some(yes, yes) : some(no, yes);
      }
    finish(call, panel, sums, (const float*)nullptr);
  }
}
#endif

// The panels from `first` to `last`.
template <class Weight, class Input, class Sum>
void multiply_panels(const Call& call, int64_t first, int64_t last) {
  const Linear& p = call.linear;
  constexpr int STEP = filled_to(sizeof(Weight));
  const int padded = (p.in + STEP - 1) / STEP * STEP;
  // Rows a power of two apart would be put into the same places of a cache.
  const int stride = padded + 64 / int(sizeof(Input));
  const int block = call.rows > TILE ? BLOCK : padded;
  float* factors = scratch<float, 2>(call.rows);
  const Input* x = prepare<Input>(call, padded, stride, factors);
  Sum* sums = scratch<Sum, 3>(size_t(call.rows) * PANEL);
  for (int64_t panel = first; panel < last; panel++) {
    const Weight* w = (const Weight*)p.weight + size_t(panel) * padded * PANEL;
    for (int k = 0; k < padded; k += block) {
      const int inputs = std::min(block, padded - k);
      const Weight* from = w + size_t(k) * PANEL;
      int row = tile_of<TILE>(call.rows, [&](auto n) { tile<n, true>(from, x + k, stride, inputs, k == 0, sums); });
      while (row < call.rows)  // the weights are in a cache by now
        row += tile_of<TILE>(call.rows - row, [&](auto n) {
          tile<n, false>(from, x + size_t(row) * stride + k, stride, inputs, k == 0, sums + size_t(row) * PANEL);
        });
    }
    finish(call, panel, sums, factors);
  }
}

void multiply_panels(const Call& call, int64_t first, int64_t last) {
  if (first >= last || call.rows == 0) return;
  if (call.linear.dtype == FLOAT32) multiply_panels<float, float, float>(call, first, last);
#if defined(__AMX_BF16__)
  if (call.linear.dtype == BFLOAT16) multiply_panels_by_tiles(call, first, last);
#else
  if (call.linear.dtype == BFLOAT16) multiply_panels<uint16_t, Narrow, float>(call, first, last);
#endif
  if (call.linear.dtype == INT8) multiply_panels<int8_t, Whole, int32_t>(call, first, last);
}

// A weight (rows, words) of 4 bytes, rows a multiple of PANEL, in the order in which the kernels read it.
void pack(const uint32_t* weight, uint32_t* out, int64_t rows, int64_t words, int threads) {
  constexpr int64_t CORNER = 16;  // words of every row that are turned at once, a line of the cache
  run(threads, [=](int number, int count) {
    const int64_t panels = rows / PANEL;
    for (int64_t panel = panels * number / count; panel < panels * (number + 1) / count; panel++) {
      const uint32_t* from = weight + panel * PANEL * words;
      uint32_t* to = out + panel * PANEL * words;
      for (int64_t begin = 0; begin < words; begin += CORNER)
        for (int64_t row = 0; row < PANEL; row++)
          for (int64_t k = begin; k < std::min(begin + CORNER, words); k++) to[k * PANEL + row] = from[row * words + k];
    }
  });
}

// x (rows, in), twice as wide for a gate, to y (rows, out), all float32 and contiguous; added to what y holds if
// `add`. `prologue`, `norm` and `eps` as in Prologue.
void apply(const Linear* linear, const float* x, float* y, int rows, int add, int threads, int prologue,
           const float* norm, float eps) {
  const Call call{*linear, x, y, rows, add, prologue, norm, eps};
  const int64_t panels = panels_of(*linear);
  run(threads, [&](int64_t number, int64_t count) { multiply_panels(call, panels * number / count, panels * (number + 1) / count); });
}

}  // namespace
