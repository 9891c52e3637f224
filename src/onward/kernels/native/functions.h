// Functions of vectors, exact to an ulp or two, with the limits and the NaN of the ones that they stand for.
#pragma once
#include <limits>

#include "vectors.h"

namespace onward {
namespace ONWARD_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline V absolute(V x) { return reinterpret_cast<V>(reinterpret_cast<VI>(x) & 0x7fffffff); }

// One number of all lanes, halves first: that is quicker than one lane after another.
template <class Join>
float joined(V v, const Join& join) {
  float lanes[kLanes];
  store(lanes, v);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = join(lanes[i], lanes[i + half]);
  return lanes[0];
}
inline float total_of(V v) {
  return joined(v, [](float a, float b) { return a + b; });
}
inline float largest_of(V v) {
  return joined(v, [](float a, float b) { return a > b ? a : b; });
}

// x within limits; NaN stays.
#if defined(__AVX512F__)
inline V at_least(V x, float limit) { return _mm512_max_ps(all(limit), x); }  // the second one, if one is NaN
inline V at_most(V x, float limit) { return _mm512_min_ps(all(limit), x); }
#else
inline V at_least(V x, float limit) { return choose(x < limit, all(limit), x); }
inline V at_most(V x, float limit) { return choose(x > limit, all(limit), x); }
#endif

// x times 2^n for a whole number n, which may be too small or too large for a number of its own.
#if defined(__AVX512F__)
inline V times_power_of_two(V x, V n) { return _mm512_scalef_ps(x, n); }
#else
inline V power_of_two(VI n) { return reinterpret_cast<V>((n + 127) << 23); }
inline V times_power_of_two(V x, V n) {
  const VI whole = __builtin_convertvector(n, VI), half = whole >> 1;
  return x * power_of_two(half) * power_of_two(whole - half);
}
#endif

inline V exp(V x) {
  x = at_most(at_least(x, -104.f), 89.f);  // that is 0 already, and infinite
  const V n = x * 1.44269504f + 12582912.f - 12582912.f;  // 1.5 * 2^23: what is behind the point is rounded away
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // the logarithm of 2, in two parts
  V p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  return times_power_of_two(p, n);
}

inline V sigmoid(V x) { return 1.f / (1.f + exp(-x)); }

inline V tanh(V x) {
  const V size = absolute(x), square = x * x;
  V near = all(-5.70498872745e-3f);
  near = near * square + 2.06390887954e-2f;
  near = near * square + -5.37397155531e-2f;
  near = near * square + 1.33314422036e-1f;
  near = near * square + -3.33332819422e-1f;
  near = near * square * x + x;
  const V far = 1.f - 2.f / (exp(size + size) + 1.f);
  return choose(size > 0.625f, choose(x < 0.f, -far, far), near);
}

inline V erf(V x) {
  const V size = absolute(x), square = x * x;
  const V t = at_most(size, 4.f);
  V far = -1.72853470e-5f * t + 3.83197126e-4f;
  far = far * (t * t) + (-3.88396438e-3f * t + 2.42546219e-2f);
  far = far * t + -1.06777877e-1f;
  far = far * t + -6.34846687e-1f;
  far = far * t + -1.28717512e-1f;
  far = 1.f - exp(far * t - t);
  far = choose(x < 0.f, -far, far);
  V near = all(-5.96761703e-4f);
  near = near * square + 4.99119423e-3f;
  near = near * square + -2.67681349e-2f;
  near = near * square + 1.12819925e-1f;
  near = near * square + -3.76125336e-1f;
  near = near * square + 1.28379166e-1f;
  near = near * x + x;
  return choose(size > 0.927734375f, far, near);
}

}  // namespace ONWARD_ISA
}  // namespace onward
