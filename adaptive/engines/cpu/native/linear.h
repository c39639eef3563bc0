// Linear layers, y = (prologue(x) * transposed(weight) + bias) * factor, for a few rows of x: GEMVs and narrow GEMMs at
// the speed of the memory that holds the weight.
//
// A weight (out, in) is cut into panels of PANEL outputs. A panel holds the weights of all its outputs for one input
// after the other (bfloat16: pair of inputs, int8: four inputs). A thread reads its panels from the first byte to the
// last in one stream, which a processor prefetches well. Every number of x is broadcast to a vector and multiplied into
// sums that stay in registers, TILE rows at a time.
//
// A sum adds its terms in the order of the inputs, whatever the number of rows. So a token's result does not depend on
// the number of other tokens.

#pragma once

#include "pool.h"
#include "vectors.h"

namespace {

// A panel of 32-bit numbers is at least a line of the processor's cache.
constexpr int VECTORS = LANES < 8 ? 4 : 2;
constexpr int PANEL = LANES * VECTORS;
// Rows whose sums fit into the 32 (AVX-512, ARM) or 16 vector registers beside a panel's weights.
#if defined(__AVX512F__)
constexpr int TILE = 12;
#else
constexpr int TILE = 6;
#endif
// Inputs of a panel that all rows use in turn while these weights are in a cache, if there are more than TILE rows.
constexpr int BLOCK = 1024;
#if defined(__AMX_BF16__)
// A tile of the processor holds TILE_INPUTS inputs of bfloat16 weights for half of a panel's outputs, or TILE_INPUTS
// inputs of at most TILE_ROWS rows of x.
constexpr int TILE_INPUTS = 32, TILE_ROWS = 16;
// The same as BLOCK, for rows in tiles. Too low: sums are loaded and stored more often. Too high: weights leave the
// second-level cache.
constexpr int TILE_BLOCK = 1024;
#endif

// A weight's inputs are padded with zeros to a multiple of this number, by the bytes of a number.
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
  const float* scales;     // (out,), for INT8: an output's weights are multiples of its scale
  const int32_t* sums;     // (out,), for INT8: the sum of an output's weights
  int32_t in, out;
  int32_t dtype;
  float factor;            // of all outputs
};

// The dtype of weights. INT8 lies in groups of four inputs, BFLOAT16 in pairs.
enum DType { FLOAT32, BFLOAT16, INT8 };

// The operation on a row of x before the product. RMS_NORM: divided by sqrt(sum(x ** 2) + eps) and multiplied by `norm`
// (in,). Gates take a row (2 * in,) of g and u. SILU_GATE: g * sigmoid(g) * u. GELU_GATE: gelu(g) * u, with GELU's
// approximation by tanh. CLAMPED_GATE: `norm` has alpha and a limit; with g at most the limit and u within plus and
// minus the limit, g * sigmoid(alpha * g) * (u + 1). SQUARED_RELU: max(x, 0) ** 2, without a gate. NaN stays NaN.
enum Prologue { NONE, RMS_NORM, SILU_GATE, GELU_GATE, SQUARED_RELU, CLAMPED_GATE };

struct Call {
  const Linear& linear;
  const float* x;
  float* y;
  int rows, add, prologue;
  const float* norm;
  float eps;
};

// The factor of x in an RMS norm, 1 / sqrt(sum(x ** 2) + eps).
inline float rms_factor(const float* x, int count, float eps) {
  Vector squares = {};
  int k = 0;
  for (; k + LANES <= count; k += LANES) squares += at(x + k) * at(x + k);
  for (; k < count; k++) eps += x[k] * x[k];
  return 1 / std::sqrt(eps + total(squares));
}

// GELU(x) is x * sigmoid of this number, up to 1e-3.
template <class Number>
inline Number gelu_argument(Number x) {
  return 1.59576912f * (x + 0.044715f * x * x * x);
}

// A row of x after the prologue, (in,): in `out`, or without a prologue in its own place.
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
    for (; k < in; k++) out[k] = x[k] <= 0 ? 0.0f : x[k] * x[k];
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
      const Vector x = lower(most, at(gate + k));
      at(out + k) = x / (1.0f + exponential(-x * alpha)) * (lower(most, higher(-most, at(up + k))) + 1.0f);
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

// Converts a row of x to the type that the kernels multiply, and returns the factor of its results. The type is float,
// or bfloat16 where the processor multiplies pairs of them. For int8 weights it is integers up to plus and minus 127,
// plus ZERO where the processor multiplies only unsigned ones.
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

// The step of a row whose largest magnitude has these bits; NaN if a number of the row is infinite or NaN. Compared as
// whole numbers, the bits of magnitudes are in the order of the magnitudes, and those of NaN are the largest.
inline float step_of(uint32_t most) {
  float top;
  std::memcpy(&top, &most, 4);
  return std::max(top, 1e-30f) / 127 + (top - top);
}

#if defined(__AVX512VNNI__)
typedef uint8_t Whole;
constexpr int ZERO = 128;  // represents zero

inline float convert(const float* x, int count, Whole* out) {
  __m512i most = _mm512_setzero_si512();
  for (int k = 0; k < count; k += LANES)
    most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(_mm512_maskz_loadu_ps(lanes(count - k), x + k))));
  const float scale = step_of(_mm512_reduce_max_epu32(most));
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
  constexpr uint32_t MAGNITUDE = 0x7fffffff;  // all bits but the sign
  Words most = {};
  uint32_t top = 0;
  int k = 0;
  for (; k + LANES <= count; k += LANES) {
    const Words magnitude = (Words)at(x + k) & MAGNITUDE;
#if defined(__ARM_NEON)
    most = magnitude > most ? magnitude : most;
#else
    most = (Words)_mm256_max_epu32((__m256i)most, (__m256i)magnitude);
#endif
  }
  for (; k < count; k++) {
    uint32_t bits;
    std::memcpy(&bits, x + k, 4);
    top = std::max(top, bits & MAGNITUDE);
  }
  for (int lane = 0; lane < LANES; lane++) top = std::max(top, most[lane]);
  const float scale = step_of(top), steps = 1 / scale;
  for (k = 0; k + LANES <= count; k += LANES) {
    const Vector x_steps = at(x + k) * steps;
#if defined(__ARM_NEON)
    const int16x4_t pairs = vqmovn_s32(vcvtnq_s32_f32((float32x4_t)x_steps));
    const int8x8_t whole = vqmovn_s16(vcombine_s16(pairs, pairs));
    std::memcpy(out + k, &whole, LANES);
#else
    const __m256i whole = _mm256_cvtps_epi32((__m256)x_steps);
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)(out + k), _mm_packs_epi16(pairs, pairs));
#endif
  }
  for (; k < count; k++) out[k] = Whole(std::lrint(x[k] * steps));
  return scale;
}
#endif

// Prepares all rows (rows, stride), with zeros behind the inputs up to `padded`, and the factors of their results
// (rows,).
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

// Distances in bytes from the current weights to those that are prefetched. Processors prefetch by themselves too, but
// some not while they compute, and not beyond a page. With few rows a thread reads as fast as the memory allows: AHEAD,
// into the first-level cache. From MANY rows on it computes for as long as it reads. Then the few lines that can be on
// their way to the first-level cache are too few to read at full speed beside the products, so weights go to the
// second-level cache first (FAR), and from there to the first (NEAR). For few rows the second instruction costs more
// than it saves.
constexpr int AHEAD = 4096, FAR = 8192, NEAR = 1024, MANY = 6;

enum Fetch { NOTHING, SOON, FAR_AHEAD };

template <Fetch FETCH, int BYTES = PANEL * 4>
inline void fetch(const void* w) {
  constexpr int LINE = 64;
  if constexpr (FETCH != NOTHING)
    for (int at = 0; at < BYTES; at += LINE) {
      const char* line = (const char*)w + at;
      if constexpr (FETCH == FAR_AHEAD) __builtin_prefetch(line + FAR, 0, 2);
      __builtin_prefetch(line + (FETCH == FAR_AHEAD ? NEAR : AHEAD), 0, 3);
    }
}

// Adds the products of ROWS rows and WIDTH vectors of outputs over the next `inputs`, whose weights lie `step` numbers
// apart. The sums continue from `sums`, whose rows lie `apart` numbers apart, or begin at zero if `first`. FETCH: the
// weights come from memory.
template <int ROWS, int WIDTH, Fetch FETCH, class Number>
inline void multiply(const Number* w, int step, const float* x, int stride, int inputs, bool first, float* sums, int apart) {
  Vector acc[ROWS][WIDTH];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < WIDTH; v++) acc[r][v] = first ? Vector{} : at(sums + size_t(r) * apart + v * LANES);
  for (int k = 0; k < inputs; k++, w += step) {
    fetch<FETCH, WIDTH * LANES * int(sizeof(Number))>(w);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < WIDTH; v++) acc[r][v] += load(w + v * LANES) * x[size_t(r) * stride + k];
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < WIDTH; v++) at(sums + size_t(r) * apart + v * LANES) = acc[r][v];
}

// Does the same for a whole panel, with sums (ROWS, PANEL).
template <int ROWS, Fetch FETCH>
inline void tile(const float* w, const float* x, int stride, int inputs, bool first, float* sums) {
  multiply<ROWS, VECTORS, FETCH>(w, PANEL, x, stride, inputs, first, sums, PANEL);
}

template <int ROWS, Fetch FETCH>
inline void tile(const uint16_t* w, const Narrow* x, int stride, int inputs, bool first, float* sums) {
#if defined(__AVX512BF16__)
  __m512 acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) acc[r][v] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * PANEL + v * LANES);
  for (int k = 0; k < inputs; k += 2, w += 2 * PANEL) {
    fetch<FETCH>(w);
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
    fetch<FETCH>(w);
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
#elif defined(__ARM_NEON)
typedef int32x4_t Wholes;
#else
typedef __m256i Wholes;
#endif

inline Wholes wholes(const void* from) {
  Wholes loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

// Adds to every lane's sum the products of the four inputs in `four` and the lane's four weights.
inline Wholes add_products(Wholes sum, int32_t four, Wholes weights) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(four), weights);
#elif defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, vreinterpretq_s8_s32(weights), vreinterpretq_s8_s32(vdupq_n_s32(four)));
#elif defined(__ARM_NEON)
  // A sum of two products is within 16 bits, as below.
  const int8x16_t w = vreinterpretq_s8_s32(weights), x = vreinterpretq_s8_s32(vdupq_n_s32(four));
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_s8(vget_high_s8(w), vget_high_s8(x));
  return vpadalq_s16(sum, vpaddq_s16(low, high));
#else
  // The signs move to the weights, as the instruction requires. A sum of two products is at most 2 * 127 * 127, within
  // 16 bits.
  const __m256i x = _mm256_set1_epi32(four);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(weights, x));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

template <int ROWS, Fetch FETCH>
inline void tile(const int8_t* w, const Whole* x, int stride, int inputs, bool first, int32_t* sums) {
  Wholes acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) acc[r][v] = first ? Wholes{} : wholes(sums + r * PANEL + v * LANES);
  for (int k = 0; k < inputs; k += 4, w += 4 * PANEL) {
    fetch<FETCH>(w);
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

// Calls `tile` with the number of rows as a constant, but at most ROWS, and returns that number.
template <int ROWS, class Tile>
inline int tile_of(int rows, const Tile& tile) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return tile_of<ROWS - 1>(rows, tile);
  tile(std::integral_constant<int, ROWS>());
  return ROWS;
}

// The rows of the next tile, of `rows` that are left.
template <class Weight>
inline int next_tile(int rows) {
#if !defined(__AVX512F__)
  // Tiles of nearly one size: a small one adds to too few sums to be fast. With 16 registers five rows of bfloat16:
  // for the sums of six one is missing, that of the mask for the second half of each pair of weights.
  constexpr int MOST = LANES == 8 && sizeof(Weight) == 2 ? TILE - 1 : TILE;
  const int tiles = (rows + MOST - 1) / MOST;
  if (rows > TILE) return (rows + tiles - 1) / tiles;
#endif
  return std::min(rows, TILE);
}

inline int64_t panels_of(const Linear& p) { return (p.out + PANEL - 1) / PANEL; }

// Turns the sums (rows, PANEL) of a panel into results in `y`, at most up to the end of a row.
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
// Makes the compiler complete its writes before tiles are loaded: it does not know that tile instructions read memory.
inline void written(const void* memory) { __asm__ volatile("" ::"r"(memory) : "memory"); }

// The processor's tiles. 0 and 1 hold the sums of one tile of rows for the two halves of a panel, 2 and 3 those of
// another tile of rows; 4 and 5 hold the rows of x, 6 and 7 the weights of the halves, which a panel already has in a
// tile's order.
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

// Prepares all rows as `prepare` does, but in tiles of `rows` rows and TILE_INPUTS inputs: the numbers of a tile lie
// together, and the tiles of the same rows one behind the other. With separate rows a processor would have to prefetch
// as many streams.
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

// Does the work of `tile` for one or TWO tiles of `rows` rows. The second tile of x lies `apart` numbers behind the
// first.
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
      for (int pair = 0; pair < TILE_INPUTS / 2; pair++) fetch<SOON>(w + pair * 2 * PANEL);
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

// multiply_panels for bfloat16 by tiles. It is used for any number of rows, since tiles add in another order than
// vectors do.
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

// Computes the panels from `first` up to, but without, `last`.
template <class Weight, class Input, class Sum>
void multiply_panels(const Call& call, int64_t first, int64_t last) {
  const Linear& p = call.linear;
  constexpr int STEP = filled_to(sizeof(Weight));
  const int padded = (p.in + STEP - 1) / STEP * STEP;
  // Rows a power of two apart would compete for the same places of a cache.
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
      int row = tile_of<TILE>(next_tile<Weight>(call.rows), [&](auto n) {
        if (call.rows >= MANY) return tile<n, FAR_AHEAD>(from, x + k, stride, inputs, k == 0, sums);
        tile<n, SOON>(from, x + k, stride, inputs, k == 0, sums);
      });
      while (row < call.rows)  // the weights are in a cache by now
        row += tile_of<TILE>(next_tile<Weight>(call.rows - row), [&](auto n) {
          tile<n, NOTHING>(from, x + size_t(row) * stride + k, stride, inputs, k == 0, sums + size_t(row) * PANEL);
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

// Packs a weight (rows, words) of 4-byte words, rows a multiple of PANEL, into the order in which the kernels read it.
void pack(const uint32_t* weight, uint32_t* out, int64_t rows, int64_t words, int threads) {
  constexpr int64_t CORNER = 16;  // words of every row that are transposed at once: a line of the cache
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

// Applies a linear layer to x (rows, in), twice as wide for a gate. The result goes to y (rows, out), or is added to it
// if `add`. All numbers are float32 and contiguous. `prologue`, `norm` and `eps` as in Prologue.
void apply(const Linear* linear, const float* x, float* y, int rows, int add, int threads, int prologue,
           const float* norm, float eps) {
  const Call call{*linear, x, y, rows, add, prologue, norm, eps};
  const int64_t panels = panels_of(*linear);
  run(threads, [&](int64_t number, int64_t count) { multiply_panels(call, panels * number / count, panels * (number + 1) / count); });
}

}  // namespace
