// From logits to probabilities and to a token, in few passes over the vocabulary.

#pragma once

#include <functional>
#include <numeric>
#include <utility>

#include "noise.h"
#include "vectors.h"

namespace {

// How many probabilities are summed in float32 before the sum is added in float64.
constexpr int CHUNK = 256;

// The sum of p (count,), or with q the sum of max(p - q, 0).
inline float mass(const float* p, const float* q, int count) {
  Vector sums = {};
  float sum = 0;
  int i = 0;
  for (; i + LANES <= count; i += LANES) sums += q ? higher(at(p + i) - at(q + i), Vector{}) : at(p + i);
  for (; i < count; i++) sum += q ? std::max(p[i] - q[i], 0.0f) : p[i];
  return sum + total(sums);
}

// The largest of x (count,), ignoring NaN.
inline float largest(const float* x, int64_t count) {
  constexpr int APART = 4;  // independent maxima, so that none waits for the one before it
  Vector several[APART], most = Vector{} - INFINITY;
  float top = -INFINITY;
  int64_t i = 0;
  for (Vector& v : several) v = most;
  for (; i + APART * LANES <= count; i += APART * LANES)
    for (int j = 0; j < APART; j++) several[j] = higher(at(x + i + j * LANES), several[j]);
  for (; i + LANES <= count; i += LANES) most = higher(at(x + i), most);
  for (const Vector& v : several) most = higher(v, most);
  for (; i < count; i++) top = std::max(top, x[i]);
  return std::max(top, topmost(most));
}

// Whether x (count,) has a NaN.
inline bool broken(const float* x, int64_t count) {
  Words found = {};
  bool any = false;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) found |= (Words)(at(x + i) != at(x + i));
  for (; i < count; i++) any |= x[i] != x[i];
  for (int lane = 0; lane < LANES; lane++) any |= found[lane] != 0;
  return any;
}

// The likeliest token, of equal ones the first; -1 if a logit is NaN or the largest is not finite.
inline int64_t likeliest(const float* logits, int64_t count) {
  float top = -INFINITY;
  int64_t from = 0;
  for (int64_t begin = 0; begin < count; begin += CHUNK) {
    const int64_t size = std::min<int64_t>(CHUNK, count - begin);
    const float here = largest(logits + begin, size);
    if (broken(logits + begin, size)) return -1;
    if (here > top) top = here, from = begin;
  }
  if (!std::isfinite(top)) return -1;
  return std::find(logits + from, logits + std::min(from + CHUNK, count), top) - logits;
}

// Sets the logits of all tokens but the `allowed` ones (a bit each, in words of 32) to -infinity; does nothing if no
// token is allowed.
inline void leave_out(const uint32_t* allowed, float* logits, int64_t count) {
  bool any = false;
  for (int64_t i = 0; i < count / 32; i++) any |= allowed[i] != 0;
  if (!any && !(count % 32 && allowed[count / 32] << (32 - count % 32))) return;
  for (int64_t begin = 0; begin < count; begin += 32) {
    const uint32_t word = allowed[begin / 32];
    const int size = int(std::min<int64_t>(32, count - begin));
    for (int i = 0; word != ~0u && i < size; i++) logits[begin + i] = word >> i & 1 ? logits[begin + i] : -INFINITY;
  }
}

// The k-th largest of x (k at most count). Only chunks whose maximum is among the k largest chunk maxima can contain
// it.
inline float kth_largest(const float* x, int64_t count, int64_t k) {
  const int64_t chunks = (count + CHUNK - 1) / CHUNK;
  float *tops = scratch<float, 11>(2 * chunks), *ordered = tops + chunks, *kept = scratch<float, 12>(count);
  for (int64_t c = 0; c < chunks; c++)
    ordered[c] = tops[c] = largest(x + c * CHUNK, std::min<int64_t>(CHUNK, count - c * CHUNK));
  float bound = -INFINITY;
  if (k <= chunks) {
    std::nth_element(ordered, ordered + k - 1, ordered + chunks, std::greater<float>());
    bound = ordered[k - 1];
  }
  int64_t found = 0;
  for (int64_t c = 0; c < chunks; c++)
    if (tops[c] >= bound)
      for (int64_t i = c * CHUNK; i < std::min((c + 1) * CHUNK, count); i++)
        if (x[i] >= bound) kept[found++] = x[i];
  std::nth_element(kept, kept + k - 1, kept + found, std::greater<float>());
  return kept[k - 1];
}

// The sum of all p that are at least `least`; NaN if p has a NaN.
inline double mass_from(const float* p, int64_t count, float least) {
  double whole = 0;
  for (int64_t begin = 0; begin < count; begin += CHUNK) {
    const int size = int(std::min<int64_t>(CHUNK, count - begin));
    Vector sums = {};
    float sum = 0;
    int i = 0;
    for (; i + LANES <= size; i += LANES) sums += at(p + begin + i) < least ? Vector{} : at(p + begin + i);
    for (; i < size; i++) sum += p[begin + i] < least ? 0.0f : p[begin + i];
    whole += sum + total(sums);
  }
  return whole;
}

// Keeps the likeliest tokens of p, of equal ones the first, until they have at least `share` of its mass, and sets the
// others to 0. Only tokens above a bound are sorted. The bound begins near the largest probability and is lowered until
// they have enough mass.
inline void keep_share(float* p, int64_t count, float share) {
  const double wanted = share * mass_from(p, count, 0);
  const float top = largest(p, count);
  float least = top;
  for (double mass = 0; mass < wanted && least > 1e-30f;) mass = mass_from(p, count, least /= 64);
  typedef std::pair<float, int64_t> Token;
  static thread_local std::vector<Token> found;
  found.clear();
  for (int64_t i = 0; i < count; i++)
    if (p[i] >= least)
      found.emplace_back(-p[i], i);
    else
      p[i] = 0;
  std::sort(found.begin(), found.end());
  double before = 0;
  for (const Token& token : found) {
    if (before > 0 && before >= wanted) p[token.second] = 0;
    before -= token.first;
  }
}

// How logits become probabilities: they are multiplied by `factor`; then only the `top_k` largest stay (0: all), of
// these the likeliest with `top_p` of the mass (1: all), of these those at least `min_p` times as likely as the
// likeliest (0: all).
struct Cuts {
  float factor, top_p, min_p;
  int32_t top_k;
};

// How a token is chosen from logits: the likeliest if `greedy`, else by `cuts` and a draw. If `seeded`, the seed's
// noise for the position replaces the draw.
struct Sampling {
  Cuts cuts;
  bool greedy, seeded;
  uint64_t seed;
};

// Sets p, which need not be divided by its sum yet, to 0 for all tokens that are cut.
void cut(const Cuts& cuts, const float* logits, float* p, int64_t count) {
  if (cuts.top_k > 0 && cuts.top_k < count) {
    const float least = kth_largest(logits, count, cuts.top_k);
    for (int64_t i = 0; i < count; i++) p[i] = logits[i] < least ? 0.0f : p[i];
  }
  if (cuts.top_p < 1) keep_share(p, count, cuts.top_p);
  if (cuts.min_p > 0) {
    const float least = cuts.min_p * largest(p, count);
    for (int64_t i = 0; i < count; i++) p[i] = p[i] < least ? 0.0f : p[i];
  }
}

// Writes the probabilities (rows, count) of logits. A logit of -infinity gets 0. A row with NaN or +infinity becomes
// NaN.
void probabilities(const Cuts& cuts, const float* logits, float* out, int rows, int64_t count) {
  for (int row = 0; row < rows; row++, logits += count, out += count) {
    const float top = largest(logits, count);
    double whole = 0;
    int64_t i = 0;
    for (int64_t end = std::min<int64_t>(CHUNK, count); i < count; end = std::min(end + CHUNK, count)) {
      Vector sums = {};
      float sum = 0;
      for (; i + LANES <= end; i += LANES) {
        const Vector x = (at(logits + i) - top) * cuts.factor;
        sums += at(out + i) = x <= -87.0f ? Vector{} : exponential(x);
      }
      for (; i < end; i++) {
        const float x = (logits[i] - top) * cuts.factor;
        sum += out[i] = x <= -87.0f ? 0.0f : std::exp(x);
      }
      whole += sum + total(sums);
    }
    if (whole == whole && (cuts.top_k > 0 || cuts.top_p < 1 || cuts.min_p > 0)) {
      cut(cuts, logits, out, count);
      whole = mass_from(out, count, 0);
    }
    const float share = float(1 / whole);
    for (i = 0; i + LANES <= count; i += LANES) at(out + i) *= share;
    for (; i < count; i++) out[i] *= share;
  }
}

// The token at `share` (below 1) of the mass of p (count,), or with q (fewer,) of max(p - q, 0): the first at which the
// mass so far exceeds that share. -1 if there is no mass.
int64_t draw(const float* p, const float* q, int64_t count, int64_t fewer, double share) {
  const auto chunk = [&](int64_t begin) {
    const int size = int(std::min<int64_t>(CHUNK, count - begin));
    const int both = q ? int(std::min<int64_t>(size, std::max<int64_t>(fewer - begin, 0))) : 0;
    return double(mass(p + begin, q + begin, both)) + mass(p + begin + both, nullptr, size - both);
  };
  double* masses = scratch<double, 6>(count / CHUNK + 1);
  double whole = 0;
  for (int64_t begin = 0; begin < count; begin += CHUNK) whole += masses[begin / CHUNK] = chunk(begin);
  if (!(whole > 0)) return -1;
  const double wanted = share * whole;
  double before = 0;
  int64_t last = -1;
  for (int64_t begin = 0; begin < count; begin += CHUNK) {
    const double here = masses[begin / CHUNK];
    if (before + here <= wanted && begin + CHUNK < count) {
      if (here > 0) last = begin;
      before += here;
      continue;
    }
    double so_far = before;
    int64_t found = -1;
    for (int64_t i = begin; i < std::min(begin + CHUNK, count); i++) {
      const float x = q && i < fewer ? std::max(p[i] - q[i], 0.0f) : p[i];
      if (!(x > 0)) continue;
      found = i;
      so_far += x;
      if (so_far > wanted) return i;
    }
    if (found >= 0) return found;  // rounding kept the sum from exceeding `wanted`
    before += here;
  }
  // The mass ends in an earlier chunk: take its last token with mass.
  for (int64_t i = std::min(last + CHUNK, count) - 1; i >= 0; i--)
    if ((q && i < fewer ? p[i] - q[i] : p[i]) > 0) return i;
  return -1;
}

// A bound that at least k of the numbers reach, and few more: the k-th largest of the maxima of COLUMNS interleaved
// columns. -infinity if there are too few numbers.
inline float low_bound(const float* x, int64_t count, int64_t k) {
  constexpr int COLUMNS = 256;
  if (count < 2 * COLUMNS || 2 * k > COLUMNS) return -INFINITY;
  alignas(64) float tops[COLUMNS];
  std::copy(x, x + COLUMNS, tops);
  for (int64_t row = COLUMNS; row + COLUMNS <= count; row += COLUMNS)
    for (int i = 0; i < COLUMNS; i += LANES) at(tops + i) = higher(at(x + row + i), at(tops + i));
  std::nth_element(tops, tops + k - 1, tops + COLUMNS, std::greater<float>());
  return tops[k - 1];
}

// For each row of logits (rows, count): the `kept` (at most count) likeliest tokens, likeliest first and of equal ones
// the first, their log-probabilities (rows, kept), and the logarithm of the mass of all others (rows,). For a row that
// has a NaN, or whose largest logit is not finite: the first tokens, and NaN.
void likeliest_of(const float* logits, int rows, int64_t count, int kept, int32_t* ids, float* logprobs, float* rest) {
  constexpr int NEAR = 64;
  typedef std::pair<float, int32_t> Token;
  static thread_local std::vector<Token> found;
  for (int row = 0; row < rows; row++, logits += count, ids += kept, logprobs += kept) {
    const float top = largest(logits, count), least = low_bound(logits, count, kept);
    double whole = 0;
    found.clear();
    for (int64_t begin = 0; begin < count; begin += NEAR) {
      const int64_t end = std::min(begin + NEAR, count);
      Vector sums = {};
      float sum = 0;
      int64_t i = begin;
      for (; i + LANES <= end; i += LANES) sums += exponential(at(logits + i) - top);
      for (; i < end; i++) sum += std::exp(logits[i] - top);
      whole += sum + total(sums);
      if (largest(logits + begin, end - begin) >= least)
        for (i = begin; i < end; i++)
          if (logits[i] >= least) found.emplace_back(-logits[i], int32_t(i));
    }
    if (!std::isfinite(top) || whole != whole) {
      std::iota(ids, ids + kept, 0);
      std::fill(logprobs, logprobs + kept, NAN);
      rest[row] = NAN;
      continue;
    }
    std::partial_sort(found.begin(), found.begin() + kept, found.end());
    const float shift = top + float(std::log(whole));
    double mass = 0;
    for (int i = 0; i < kept; i++) {
      ids[i] = found[i].second;
      logprobs[i] = -found[i].first - shift;
      mass += std::exp(double(logprobs[i]));
    }
    rest[row] = float(std::log(std::max(0.0, 1 - mass)));
  }
}

}  // namespace
