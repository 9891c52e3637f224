// Functions of each element, and gradients that are dy times the slope of one, in one pass over memory.
#pragma once
#include "functions.h"

namespace onward {
namespace ONWARD_ISA {

constexpr Index kActivationsOfTask = 16384;

// Calls function(i, count, read) for each vector, the last of which may not be full.
template <class Function>
void each_vector(const Call& call, Index size, const Function& function) {
  split(call, size, kActivationsOfTask, [&](Index first, Index last) {
    Index i = first;
    for (; i + kLanes <= last; i += kLanes) function(i, kLanes, [](const float* p, Index) { return load(p); });
    if (i < last) function(i, last - i, [](const float* p, Index count) { return load_some(p, count); });
  });
}

template <class F>
struct Activation : Kernel {  // x -> f(x)
  explicit Activation(const Attributes& a) : f(a) {}
  void compute(const Call& call) const override {
    const auto x = call.input(0);
    auto y = call.output(0, x.sizes);
    each_vector(call, x.size(), [&](Index i, Index count, auto read) { put(y.data + i, f(read(x.data + i, count)), count); });
  }
  F f;
};

template <class F>
struct ActivationGradient : Kernel {  // dy, and x or y, whichever says more -> dx
  explicit ActivationGradient(const Attributes& a) : f(a) {}
  void compute(const Call& call) const override {
    const auto dy = call.input(0), x = call.input(1);
    require(dy.sizes == x.sizes, "a gradient has the shape of what it is of");
    auto dx = call.output(0, x.sizes);
    each_vector(call, x.size(), [&](Index i, Index count, auto read) {
      put(dx.data + i, read(dy.data + i, count) * f.slope(read(x.data + i, count)), count);
    });
  }
  F f;
};

struct Sigmoid {
  explicit Sigmoid(const Attributes&) {}
  V slope(V y) const { return y * (1.f - y); }
};

struct Tanh {
  explicit Tanh(const Attributes&) {}
  V slope(V y) const { return 1.f - y * y; }
};

struct HardSigmoid {
  explicit HardSigmoid(const Attributes& a) : alpha(a.number("alpha", 0.2f)) {}
  V slope(V y) const { return choose((y > 0.f) & (y < 1.f), all(alpha), y - y); }  // NaN of NaN
  float alpha;
};

struct Relu {
  Relu() = default;
  explicit Relu(const Attributes&) {}
  V operator()(V x) const { return choose(x < 0.f, V{}, x); }
  V slope(V x) const { return choose(x > 0.f, all(1.f), V{}); }  // of x and of y alike
};

struct LeakyRelu {
  explicit LeakyRelu(const Attributes& a) : alpha(a.number("alpha", 0.01f)) {}
  V slope(V x) const { return choose(x > 0.f, all(1.f), all(alpha)); }
  float alpha;
};

struct HardSwish {
  HardSwish() = default;
  explicit HardSwish(const Attributes&) {}
  V operator()(V x) const {
    const V h = x / 6.f + 0.5f;
    return x * choose(h < 0.f, V{}, choose(h > 1.f, all(1.f), h));
  }
  V slope(V x) const {
    const V h = x / 6.f + 0.5f;
    return choose(h <= 0.f, V{}, choose(h >= 1.f, all(1.f), h + x / 6.f));
  }
};

struct Swish {
  explicit Swish(const Attributes& a) : alpha(a.number("alpha", 1)) {}
  V operator()(V x) const { return x * sigmoid(x * alpha); }
  V slope(V x) const {
    const V s = sigmoid(x * alpha);
    return s + x * (s * (1.f - s) * alpha);
  }
  float alpha;
};

// x P(x), P the normal distribution.
struct Gelu {
  explicit Gelu(const Attributes&) {}
  static V share(V x) { return 0.5f * (1.f + erf(x * 0.707106781f)); }
  V operator()(V x) const { return x * share(x); }
  V slope(V x) const { return share(x) + x * (exp(x * x * -0.5f) * 0.398942280f); }
};

// The same, P being sigmoid(2c (x + 0.044715 x^3)), c = sqrt(2 / pi).
struct GeluOfTanh {
  explicit GeluOfTanh(const Attributes&) {}
  static constexpr float kScale = 1.595769122f, kCube = 0.044715f;
  static V near(V x) {  // beyond, P is 0 or 1, and x^3 might overflow
    x = choose(x > 20.f, all(20.f), x);
    return choose(x < -20.f, all(-20.f), x);
  }
  static V share(V x) { return sigmoid(x * (x * x * (kScale * kCube) + kScale)); }
  V operator()(V x) const { return x * share(near(x)); }
  V slope(V x) const {
    x = near(x);
    const V p = share(x);
    return p * (1.f + (1.f - p) * (x * (x * x * (kScale * 3 * kCube) + kScale)));
  }
};

}  // namespace ONWARD_ISA
}  // namespace onward
