// Vectors of floats as wide as the instructions that this file is compiled for.
#pragma once
#include <cmath>
#include <type_traits>
#include <utility>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "operators.h"

#if defined(__AVX512F__)
#define ONWARD_LANES 16
#elif defined(__AVX2__)
#define ONWARD_LANES 8
#else
#define ONWARD_LANES 4
#endif

namespace onward {
namespace ONWARD_ISA {

constexpr int kLanes = ONWARD_LANES;
typedef float V __attribute__((vector_size(4 * ONWARD_LANES)));
typedef int VI __attribute__((vector_size(4 * ONWARD_LANES)));
typedef float Unaligned __attribute__((vector_size(4 * ONWARD_LANES), aligned(4), may_alias));

inline V load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
inline void store(float* p, V v) { *reinterpret_cast<Unaligned*>(p) = v; }
inline V all(float x) { return x - V{}; }

// The first `count` elements, fewer than there are lanes, and zeros.
#if defined(__AVX512F__)
inline __mmask16 mask_of(Index count) { return static_cast<__mmask16>((1u << count) - 1); }
inline V load_some(const float* p, Index count) { return _mm512_maskz_loadu_ps(mask_of(count), p); }
inline void store_some(float* p, V v, Index count) { _mm512_mask_storeu_ps(p, mask_of(count), v); }
#else
inline V load_some(const float* p, Index count) {
  V v{};
  for (Index i = 0; i < std::min<Index>(count, kLanes); i++) v[i] = p[i];
  return v;
}
inline void store_some(float* p, V v, Index count) {
  for (Index i = 0; i < std::min<Index>(count, kLanes); i++) p[i] = v[i];
}
#endif

// The same for any number of lanes; for one that is known to be all of them, without asking.
using Full = std::integral_constant<Index, kLanes>;
inline V get(const float* p, Full) { return load(p); }
inline V get(const float* p, Index lanes) { return lanes == kLanes ? load(p) : load_some(p, lanes); }
inline void put(float* p, V v, Full) { store(p, v); }
inline void put(float* p, V v, Index lanes) { lanes == kLanes ? store(p, v) : store_some(p, v, lanes); }

// Calls function(i, lanes) for vectors of a row, the last of which may have fewer lanes.
template <class Function>
void along(Index count, const Function& function) {
  Index i = 0;
  for (; i + kLanes <= count; i += kLanes) function(i, Full());
  if (i < count) function(i, count - i);
}

inline V choose(VI where, V yes, V no) { return where ? yes : no; }
inline V larger(V a, V b) { return choose(a > b, a, b); }

// Half of the numbers of two vectors, from `first` on: one of each after the other.
template <int first, int... i>
V interleaved(V a, V b, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (first + i / 2 + i % 2 * kLanes)...);
#else
  return __builtin_shuffle(a, b, VI{(first + i / 2 + i % 2 * kLanes)...});
#endif
}

// to[j][i] = scale from[i][j], for as many rows as there are lanes.
inline void turn_block(const float* from, Index stride, float scale, float* to, Index to_stride) {
  constexpr std::make_integer_sequence<int, kLanes> kEachLane;
  V rows[kLanes], next[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) rows[i] = load(from + i * stride) * scale;
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; i++) {
      next[2 * i] = interleaved<0>(rows[i], rows[i + kLanes / 2], kEachLane);
      next[2 * i + 1] = interleaved<kLanes / 2>(rows[i], rows[i + kLanes / 2], kEachLane);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) store(to + i * to_stride, rows[i]);
}

// The same for any number of rows and columns.
inline void turn(const float* from, Index stride, Index rows, Index columns, float scale, float* to, Index to_stride) {
  const Index whole_rows = rows / kLanes * kLanes, whole_columns = columns / kLanes * kLanes;
  for (Index i = 0; i < whole_rows; i += kLanes)
    for (Index j = 0; j < whole_columns; j += kLanes)
      turn_block(from + i * stride + j, stride, scale, to + j * to_stride + i, to_stride);
  for (Index i = 0; i < rows; i++)
    for (Index j = i < whole_rows ? whole_columns : 0; j < columns; j++)
      to[j * to_stride + i] = from[i * stride + j] * scale;
}

inline Index ceiling(Index a, Index b) { return (a + b - 1) / b; }

// Calls function(first, last) for parts of a range, each large enough to be worth a thread's while.
template <class Function>
void split(const Call& call, Index count, Index least, const Function& function) {
  constexpr Index kMost = 64;
  const Index parts = std::max<Index>(1, std::min(kMost, count / std::max<Index>(least, 1)));
  call.parallel(parts, [&](Index i) { function(count * i / parts, count * (i + 1) / parts); });
}

}  // namespace ONWARD_ISA
}  // namespace onward
