// From logits to probabilities to a token, one pass over a vocabulary each.

#pragma once

#include "vectors.h"

namespace {

// Probabilities that are added up in float32 before they count in float64.
constexpr int CHUNK = 256;

// The sum of p, or where there is q of what p has more than q, over so many tokens.
inline float mass(const float* p, const float* q, int count) {
  Vector sums = {};
  float sum = 0;
  int i = 0;
  for (; i + LANES <= count; i += LANES) sums += q ? higher(at(p + i) - at(q + i), Vector{}) : at(p + i);
  for (; i < count; i++) sum += q ? std::max(p[i] - q[i], 0.0f) : p[i];
  return sum + total(sums);
}

}  // namespace

extern "C" {

// The probabilities (rows, count) of logits times a factor. A logit of -infinity has 0; where there is one that is no
// number, or +infinity, the whole row is none.
void softmax(const float* logits, float* out, int rows, int64_t count, float factor) {
  for (int row = 0; row < rows; row++, logits += count, out += count) {
    Vector most = Vector{} - INFINITY;
    float top = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) most = higher(at(logits + i), most);
    for (; i < count; i++) top = std::max(top, logits[i]);
    for (int lane = 0; lane < LANES; lane++) top = std::max(top, most[lane]);
    for (i = 0; i + LANES <= count; i += LANES) {
      const Vector x = (at(logits + i) - top) * factor;
      at(out + i) = x <= -87.0f ? Vector{} : exponential(x);
    }
    for (; i < count; i++) {
      const float x = (logits[i] - top) * factor;
      out[i] = x <= -87.0f ? 0.0f : std::exp(x);
    }
    double whole = 0;
    for (i = 0; i < count; i += CHUNK) whole += mass(out + i, nullptr, int(std::min<int64_t>(CHUNK, count - i)));
    const float share = float(1 / whole);
    for (i = 0; i + LANES <= count; i += LANES) at(out + i) *= share;
    for (; i < count; i++) out[i] *= share;
  }
}

// The token at `share` (below 1) of the mass of p (count,), or where there is q (fewer,) of what p has more than q:
// the first at which the mass so far exceeds that share; -1 where there is no mass.
int64_t draw(const float* p, const float* q, int64_t count, int64_t fewer, double share) {
  const auto chunk = [&](int64_t begin) {
    const int size = int(std::min<int64_t>(CHUNK, count - begin));
    const int both = q ? int(std::min<int64_t>(size, std::max<int64_t>(fewer - begin, 0))) : 0;
    return double(mass(p + begin, q + begin, both)) + mass(p + begin + both, nullptr, size - both);
  };
  double* masses = room<double, 6>(count / CHUNK + 1);
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
    if (found >= 0) return found;  // by the rounding of the sums
    before += here;
  }
  // The mass ends in an earlier chunk: its last token that has any.
  for (int64_t i = std::min(last + CHUNK, count) - 1; i >= 0; i--)
    if ((q && i < fewer ? p[i] - q[i] : p[i]) > 0) return i;
  return -1;
}
}
