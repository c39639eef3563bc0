// Noise fixed by a seed: an exponential random number for every position of a text and every token. Target and draft,
// which do not see each other's choice, thus make the same choice where their distributions allow it. The token with
// the least noise / probability is a draw from the probabilities (an exponential race, equivalent to adding Gumbel
// noise to logits). adaptive/noise.py computes the same numbers with tensors.

#pragma once

#include "vectors.h"

namespace {

// Two keys for a position of a text, mixed as in splitmix64.
struct Keys {
  uint32_t low, high;
};

inline uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

inline Keys keys_of(uint64_t seed, int64_t position) {
  const uint64_t key = mix(mix(seed + 0x9e3779b97f4a7c15u) + uint64_t(position + 1) * 0x9e3779b97f4a7c15u);
  return {uint32_t(key), uint32_t(key >> 32)};
}

inline Words mix(Words x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// -log(1 - x) of numbers in (0, 1), with a relative error of a few millionths: 1 - x is m * 2 to the k, and log(m) is
// twice the inverse hyperbolic tangent of (m - 1) / (m + 1).
inline Vector exponential_of(Vector x) {
  const Vector rest = 1.0f - x;
  const Words bits = (Words)rest - 0x3f3504f3u;  // m is from the square root of a half on
  const Words kept = (bits & 0x007fffffu) + 0x3f3504f3u;
  typedef int32_t Signed __attribute__((vector_size(LANES * 4), aligned(4)));
  const Vector power = __builtin_convertvector((Signed)bits >> 23, Vector), m = (Vector)kept;
  const Vector s = (m - 1.0f) / (m + 1.0f), z = s * s;
  const Vector series = s * (2.0f + z * (2.0f / 3 + z * (2.0f / 5 + z * (2.0f / 7 + z * (2.0f / 9)))));
  const Vector lost = (x - (1.0f - rest)) / rest;  // corrects the rounding of 1 - x
  return lost - series - power * 0.693147181f;
}

// Uniform random numbers in (0, 1) for the tokens from `first` on.
inline Vector uniform_of(Keys keys, uint32_t first) {
#if defined(__AVX512F__)
  const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
  const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7};
#else
  const Words lanes = {0, 1, 2, 3};
#endif
  const Words bits = mix(mix((lanes + first) * 0x9e3779b9u + keys.low) ^ keys.high);
  return lower(__builtin_convertvector(bits, Vector) * 0x1p-32f + 0x1p-33f, Vector{} + 0x1.fffffep-1f);
}

inline bool any_above(Vector a, Vector b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#elif defined(__ARM_NEON)
  return vmaxvq_u32(vcgtq_f32((float32x4_t)a, (float32x4_t)b)) != 0;
#else
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#endif
}

// The token of p (count,) that wins the race, of equal ones the first; -1 if there is no mass, or p is NaN.
//
// -log(1 - x) is at least x, so only a token with x / p below the best time so far can win. Few tokens have that, so
// most logarithms are not computed. If no possible x is small enough, x is not computed either.
inline int64_t race(const float* p, int64_t count, Keys keys) {
  constexpr float LEAST = 0x1p-34f, ROUNDING = 0.9999f;
  float best = INFINITY;
  int64_t winner = -1;
  const auto step = [&](const Vector& likely, int64_t first) {
    const Vector bound = likely * best;  // for tokens without mass NaN at first, then zero
    if (!any_above(bound, Vector{} + LEAST)) return;
    const Vector x = uniform_of(keys, uint32_t(first));
    if (!any_above(bound, x * ROUNDING)) return;
    const Vector times = exponential_of(x) / likely;
    for (int lane = 0; lane < LANES; lane++)
      if (likely[lane] > 0 && times[lane] < best) best = times[lane], winner = first + lane;
  };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) step(at(p + i), i);
  if (i < count) {
    float last[LANES] = {};
    std::copy(p + i, p + count, last);
    step(at(last), i);
  }
  return winner;
}

}  // namespace
