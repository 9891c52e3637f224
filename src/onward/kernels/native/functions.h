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

// 2^n for whole numbers n, as the bits of a float.
inline V power_of_two(VI n) { return reinterpret_cast<V>((n + 127) << 23); }

inline V exp(V x) {
  x = choose(x < -104.f, all(-104.f), x);  // that is 0 already, and what is more than 89 infinite; NaN stays
  x = choose(x > 89.f, all(89.f), x);
  const V shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: what is behind the point is rounded away
  const VI n = reinterpret_cast<VI>(shifted) - 0x4b400000;
  const V whole = shifted - 12582912.f;
  const V r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // the logarithm of 2, in two parts
  V p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  const VI half = n >> 1;  // in two steps: 2^128 is none, and what is smaller than 2^-126 has fewer digits
  return p * power_of_two(half) * power_of_two(n - half);
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
  const V t = choose(size > 4.f, all(4.f), size);
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
