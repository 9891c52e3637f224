// BatchNormalization of channels-last images in training, and its gradient: rows of channels, vectors along them.
#pragma once
#include "activations.h"

namespace onward {
namespace ONWARD_ISA {

constexpr Index kRowsOfSum = 64;  // a long sum of floats loses digits: sums of so many are added up

inline Index rows_of_task(Index channels) { return std::max<Index>(1, 16384 / std::max<Index>(channels, 1)); }

// sums[k][c] += what `add` makes of each row of a part; parts are added up in their order, in double precision.
template <int outputs, class Add>
void sum_rows(const Call& call, Index rows, Index channels, double* totals, const Add& add) {
  const Index parts = std::max<Index>(1, std::min<Index>(32, rows * channels / 16384));
  float* sums = scratch(0, parts * outputs * channels);
  call.parallel(parts, [&](Index part) {
    float* own = sums + part * outputs * channels;
    std::fill(own, own + outputs * channels, 0.f);
    const Index first = rows * part / parts, last = rows * (part + 1) / parts;
    add(first, last, own);
  });
  for (Index i = 0; i < outputs * channels; i++) {
    totals[i] = 0;
    for (Index part = 0; part < parts; part++) totals[i] += sums[part * outputs * channels + i];
  }
}

// What may follow a normalization.
struct Nothing {
  V operator()(V x) const { return x; }
  V slope(V) const { return all(1); }
};

enum Follower : Index { kNothing = 0, kRelu = 1, kHardSwish = 2 };

// Calls function(what follows).
template <class Function>
void with_follower(Index follower, const Function& function) {
  switch (follower) {
    case kNothing: return function(Nothing());
    case kRelu: return function(Relu());
    case kHardSwish: return function(HardSwish());
  }
  throw std::runtime_error("a normalization does not know this activation");
}

struct BatchNormalization : Kernel {  // x, scale, bias -> y, mean, variance of the population
  explicit BatchNormalization(const Attributes& a)
      : epsilon(a.number("epsilon", 1e-5f)), activation(a.integer("activation", kNothing)) {}

  void compute(const Call& call) const override {
    const auto x = call.input(0), scale = call.input(1), bias = call.input(2);
    require(!x.sizes.empty(), "a normalization needs channels");
    const Index channels = x.sizes.back(), rows = channels == 0 ? 0 : x.size() / channels;
    require(scale.size() == channels && bias.size() == channels, "scale and bias have a number of each channel");
    auto y = call.output(0, x.sizes);
    auto mean = call.output(1, {channels}), variance = call.output(2, {channels});
    std::vector<double> totals(static_cast<size_t>(2 * channels));
    std::vector<float> middle(static_cast<size_t>(channels)), slope(middle), offset(middle);
    // About a first row, so that squares stay small.
    const float* about = x.data;
    sum_rows<2>(call, rows, channels, totals.data(), [&](Index first, Index last, float* own) {
      add_moments(x.data, about, first, last, channels, own);
    });
    for (Index c = 0; c < channels; c++) {
      const double n = static_cast<double>(rows), m = totals[static_cast<size_t>(c)] / n;
      const double v = std::max(totals[static_cast<size_t>(channels + c)] / n - m * m, 0.0);
      const double average = rows == 0 ? NAN : m + about[c];
      const float spread = static_cast<float>(std::isnan(m) ? m : v);
      if (mean) mean.data[c] = static_cast<float>(average);
      if (variance) variance.data[c] = spread;
      const double inverse = 1 / std::sqrt(static_cast<double>(spread) + epsilon);
      slope[static_cast<size_t>(c)] = static_cast<float>(scale.data[c] * inverse);
      middle[static_cast<size_t>(c)] = static_cast<float>(average);
    }
    const float *m = middle.data(), *s = slope.data(), *b = bias.data;
    with_follower(activation, [&](auto f) {
      split(call, rows, rows_of_task(channels), [&](Index first, Index last) {
        for (Index r = first; r < last; r++) {
          const float* from = x.data + r * channels;
          float* to = y.data + r * channels;
          along(channels, [&](Index c, auto lanes) {
            const V normal = (get(from + c, lanes) - get(m + c, lanes)) * get(s + c, lanes) + get(b + c, lanes);
            put(to + c, f(normal), lanes);
          });
        }
      });
    });
  }

  static void add_moments(const float* x, const float* about, Index first, Index last, Index channels, float* own) {
    std::vector<float> few(static_cast<size_t>(2 * channels));
    for (Index start = first; start < last; start += kRowsOfSum) {
      std::fill(few.begin(), few.end(), 0.f);
      float *sum = few.data(), *square = few.data() + channels;
      for (Index r = start; r < std::min(start + kRowsOfSum, last); r++) {
        const float* row = x + r * channels;
        along(channels, [&](Index c, auto lanes) {
          const V d = get(row + c, lanes) - get(about + c, lanes);
          put(sum + c, get(sum + c, lanes) + d, lanes);
          put(square + c, get(square + c, lanes) + d * d, lanes);
        });
      }
      for (Index i = 0; i < 2 * channels; i++) own[i] += few[static_cast<size_t>(i)];
    }
  }

  float epsilon;
  Index activation;
};

struct BatchNormalizationGradient : Kernel {  // dy, x, scale, bias, mean, variance -> dx, dscale, dbias
  explicit BatchNormalizationGradient(const Attributes& a)
      : epsilon(a.number("epsilon", 1e-5f)), activation(a.integer("activation", kNothing)) {}

  void compute(const Call& call) const override {
    const auto dy = call.input(0), x = call.input(1), scale = call.input(2), bias = call.input(3);
    const auto mean = call.input(4), variance = call.input(5);
    require(!x.sizes.empty() && dy.sizes == x.sizes, "a gradient has the shape of its image");
    const Index channels = x.sizes.back(), rows = channels == 0 ? 0 : x.size() / channels;
    require(scale.size() == channels && bias.size() == channels && mean.size() == channels &&
                variance.size() == channels,
            "statistics have a number of each channel");
    auto dx = call.output(0, x.sizes);
    auto dscale = call.output(1, {channels}), dbias = call.output(2, {channels});
    std::vector<float> slope(static_cast<size_t>(channels)), shift(slope), tilt(slope), inverse(slope);
    for (Index c = 0; c < channels; c++) {
      inverse[static_cast<size_t>(c)] = static_cast<float>(1 / std::sqrt(static_cast<double>(variance.data[c]) + epsilon));
      slope[static_cast<size_t>(c)] = scale.data[c] * inverse[static_cast<size_t>(c)];
    }
    std::vector<double> totals(static_cast<size_t>(2 * channels));
    const float *m = mean.data, *s = slope.data(), *b = bias.data, *a = shift.data(), *t = tilt.data();
    with_follower(activation, [&](auto f) {
      sum_rows<2>(call, rows, channels, totals.data(), [&](Index first, Index last, float* own) {
        add_sums(f, dy.data, x.data, m, s, b, first, last, channels, own);
      });
      // dx = slope (d - mean(d) - (x - mean) inverse^2 mean(d (x - mean))), d being dy before the activation
      for (Index c = 0; c < channels; c++) {
        const size_t i = static_cast<size_t>(c), j = static_cast<size_t>(channels + c);
        const double n = static_cast<double>(rows);
        if (dbias) dbias.data[c] = static_cast<float>(totals[i]);
        if (dscale) dscale.data[c] = static_cast<float>(totals[j] * inverse[i]);
        shift[i] = static_cast<float>(totals[i] / n);
        tilt[i] = static_cast<float>(totals[j] / n * inverse[i] * inverse[i]);
      }
      if (!dx) return;
      split(call, rows, rows_of_task(channels), [&](Index first, Index last) {
        for (Index r = first; r < last; r++) {
          const float *d = dy.data + r * channels, *from = x.data + r * channels;
          float* to = dx.data + r * channels;
          along(channels, [&](Index c, auto lanes) {
            const V centred = get(from + c, lanes) - get(m + c, lanes), factor = get(s + c, lanes);
            const V inner = get(d + c, lanes) * f.slope(centred * factor + get(b + c, lanes));
            put(to + c, factor * (inner - get(a + c, lanes) - centred * get(t + c, lanes)), lanes);
          });
        }
      });
    });
  }

  template <class F>
  static void add_sums(const F& f, const float* dy, const float* x, const float* m, const float* s, const float* b, Index first,
                       Index last, Index channels, float* own) {
    std::vector<float> few(static_cast<size_t>(2 * channels));
    for (Index start = first; start < last; start += kRowsOfSum) {
      std::fill(few.begin(), few.end(), 0.f);
      float *sum = few.data(), *product = few.data() + channels;
      for (Index r = start; r < std::min(start + kRowsOfSum, last); r++) {
        const float *d = dy + r * channels, *row = x + r * channels;
        along(channels, [&](Index c, auto lanes) {
          const V centred = get(row + c, lanes) - get(m + c, lanes);
          const V inner = get(d + c, lanes) * f.slope(centred * get(s + c, lanes) + get(b + c, lanes));
          put(sum + c, get(sum + c, lanes) + inner, lanes);
          put(product + c, get(product + c, lanes) + inner * centred, lanes);
        });
      }
      for (Index i = 0; i < 2 * channels; i++) own[i] += few[static_cast<size_t>(i)];
    }
  }

  float epsilon;
  Index activation;
};

}  // namespace ONWARD_ISA
}  // namespace onward
