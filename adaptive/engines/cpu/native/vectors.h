// Vectors of numbers and scratch memory, which all kernels share. Compiled once for each instruction set: on x86 avx2.cpp,
// avx512vnni.cpp, avx512bf16.cpp and amx.cpp, on ARM neon.cpp and neondot.cpp; kernels.py chooses among them.

#pragma once

#if defined(__ARM_NEON)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// Vectors may be loaded from and stored to the address of any float.
typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(4)));

inline Vector& at(float* x) { return *(Vector*)x; }
inline const Vector& at(const float* x) { return *(const Vector*)x; }

// Numbers of bfloat16 are the upper 16 bits of a float32. They are kept as integers, converted when they are loaded, and
// rounded to the nearest when they are stored.
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2)));

inline Vector load(const float* x) { return at(x); }
inline Vector load(const uint16_t* x) { return (Vector)(__builtin_convertvector(*(const Halves*)x, Words) << 16); }

inline float widened(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline uint16_t rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x == x ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
}

inline void store(float x, float* to) { *to = x; }
inline void store(float x, uint16_t* to) { *to = rounded(x); }

inline float total(Vector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__ARM_NEON)
  return vaddvq_f32((float32x4_t)v);
#else
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#endif
}

// The largest lane of a vector without NaN.
inline float topmost(Vector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__ARM_NEON)
  return vmaxvq_f32((float32x4_t)v);
#else
  __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#endif
}

// Of two numbers of which one is NaN, both give b.
inline Vector lower(Vector a, Vector b) { return a < b ? a : b; }
inline Vector higher(Vector a, Vector b) { return a > b ? a : b; }

// e to the x, with a relative error of 2e-7. x is clamped to +-87; NaN stays NaN. Computed as a power of 2 with a whole
// exponent, times a series for the rest.
inline Vector exponential(Vector given) {
  const float whole = 12582912.0f;  // 1.5 * 2 to the 23: added, it leaves the nearest whole number in the last bits
  const Vector x = lower(higher(given, Vector{} - 87.0f), Vector{} + 87.0f);
  const Vector shifted = x * 1.44269504f + whole, n = shifted - whole;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector sum = r * (1.0f / 5040) + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  return given == given ? (Vector)((Words)sum + ((Words)shifted << 23)) : given;
}

// A soft bound to plus and minus the cap: cap * tanh(x / cap).
inline Vector capped(Vector x, float cap) {
  const Vector e = exponential(x * (2 / cap));
  return (e - 1.0f) / (e + 1.0f) * cap;
}

// An allocator of memory that begins at a cache line, so that no vector and no row of a tile crosses two lines.
template <class Number>
struct InLines {
  using value_type = Number;
  static constexpr std::align_val_t LINE{64};

  InLines() = default;
  template <class Other>
  InLines(const InLines<Other>&) {}
  Number* allocate(size_t count) { return (Number*)::operator new(count * sizeof(Number), LINE); }
  void deallocate(Number* memory, size_t) { ::operator delete(memory, LINE); }
  template <class Other>
  bool operator==(const InLines<Other>&) const { return true; }
  template <class Other>
  bool operator!=(const InLines<Other>&) const { return false; }
};

// Thread-local memory for `count` numbers. The thread's next call for the same type and `Use` may move it.
template <class Number, int Use>
Number* scratch(size_t count) {
  static thread_local std::vector<Number, InLines<Number>> kept;
  if (kept.size() < count) kept.resize(count);
  return kept.data();
}

}  // namespace
