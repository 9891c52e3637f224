// BatchNormalization of channels-last images in training, and its gradient: rows of channels, vectors along them.
#pragma once
#include "vectors.h"

namespace onward {
namespace ONWARD_ISA {

// sums[k][c] += what `add` makes of each row of a part; parts are added up in their order, in double precision.
template <int outputs, class Add>
void sum_rows(const Call& call, Index rows, Index channels, double* totals, const Add& add) {
  const Index parts = std::max<Index>(1, std::min<Index>(32, rows * channels / 16384));
  float* sums = scratch(0, parts * outputs * channels);
  call.parallel(parts, [&](Index part) {
    float* own = sums + part * outputs * channels;
    std::fill(own, own + outputs * channels, 0.f);
    // Few rows at a time: a long sum of floats would lose digits.
    const Index first = rows * part / parts, last = rows * (part + 1) / parts;
    add(first, last, own);
  });
  for (Index i = 0; i < outputs * channels; i++) {
    totals[i] = 0;
    for (Index part = 0; part < parts; part++) totals[i] += sums[part * outputs * channels + i];
  }
}

// Vectors along channels, with what is left at the end element by element: function(c, count of lanes).
template <class Full, class Some>
void along(Index channels, const Full& full, const Some& some) {
  Index c = 0;
  for (; c + kLanes <= channels; c += kLanes) full(c);
  for (; c < channels; c++) some(c);
}

struct BatchNormalization : Kernel {  // x, scale, bias -> y, mean, variance of the population
  explicit BatchNormalization(const Attributes& a) : epsilon(a.number("epsilon", 1e-5f)) {}

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
      mean.data[c] = static_cast<float>(average);
      variance.data[c] = static_cast<float>(std::isnan(m) ? m : v);
      const double inverse = 1 / std::sqrt(static_cast<double>(variance.data[c]) + epsilon);
      slope[static_cast<size_t>(c)] = static_cast<float>(scale.data[c] * inverse);
      middle[static_cast<size_t>(c)] = static_cast<float>(average);
    }
    const float *m = middle.data(), *s = slope.data(), *b = bias.data;
    split(call, rows, std::max<Index>(1, 16384 / std::max<Index>(channels, 1)), [&](Index first, Index last) {
      for (Index r = first; r < last; r++) {
        const float* from = x.data + r * channels;
        float* to = y.data + r * channels;
        along(channels, [&](Index c) { store(to + c, (load(from + c) - load(m + c)) * load(s + c) + load(b + c)); },
              [&](Index c) { to[c] = (from[c] - m[c]) * s[c] + b[c]; });
      }
    });
  }

  static void add_moments(const float* x, const float* about, Index first, Index last, Index channels, float* own) {
    constexpr Index kRows = 64;  // a sum of floats as long as this, then one of these
    std::vector<float> few(static_cast<size_t>(2 * channels));
    for (Index start = first; start < last; start += kRows) {
      std::fill(few.begin(), few.end(), 0.f);
      float *sum = few.data(), *square = few.data() + channels;
      for (Index r = start; r < std::min(start + kRows, last); r++) {
        const float* row = x + r * channels;
        along(channels,
              [&](Index c) {
                const V d = load(row + c) - load(about + c);
                store(sum + c, load(sum + c) + d);
                store(square + c, load(square + c) + d * d);
              },
              [&](Index c) {
                const float d = row[c] - about[c];
                sum[c] += d;
                square[c] += d * d;
              });
      }
      for (Index i = 0; i < 2 * channels; i++) own[i] += few[static_cast<size_t>(i)];
    }
  }

  float epsilon;
};

struct BatchNormalizationGradient : Kernel {  // dy, x, scale, mean, variance -> dx, dscale, dbias
  explicit BatchNormalizationGradient(const Attributes& a) : epsilon(a.number("epsilon", 1e-5f)) {}

  void compute(const Call& call) const override {
    const auto dy = call.input(0), x = call.input(1), scale = call.input(2), mean = call.input(3);
    const auto variance = call.input(4);
    require(!x.sizes.empty() && dy.sizes == x.sizes, "a gradient has the shape of its image");
    const Index channels = x.sizes.back(), rows = channels == 0 ? 0 : x.size() / channels;
    require(scale.size() == channels && mean.size() == channels && variance.size() == channels,
            "statistics have a number of each channel");
    auto dx = call.output(0, x.sizes);
    auto dscale = call.output(1, {channels}), dbias = call.output(2, {channels});
    std::vector<double> totals(static_cast<size_t>(2 * channels));
    sum_rows<2>(call, rows, channels, totals.data(), [&](Index first, Index last, float* own) {
      add_sums(dy.data, x.data, mean.data, first, last, channels, own);
    });
    // dx = slope (dy - mean(dy) - (x - mean) inverse^2 mean(dy (x - mean)))
    std::vector<float> slope(static_cast<size_t>(channels)), shift(slope), tilt(slope);
    for (Index c = 0; c < channels; c++) {
      const size_t i = static_cast<size_t>(c);
      const double inverse = 1 / std::sqrt(static_cast<double>(variance.data[c]) + epsilon), n = static_cast<double>(rows);
      dbias.data[c] = static_cast<float>(totals[i]);
      dscale.data[c] = static_cast<float>(totals[i + static_cast<size_t>(channels)] * inverse);
      slope[i] = static_cast<float>(scale.data[c] * inverse);
      shift[i] = static_cast<float>(totals[i] / n);
      tilt[i] = static_cast<float>(totals[i + static_cast<size_t>(channels)] / n * inverse * inverse);
    }
    const float *m = mean.data, *s = slope.data(), *a = shift.data(), *t = tilt.data();
    split(call, rows, std::max<Index>(1, 16384 / std::max<Index>(channels, 1)), [&](Index first, Index last) {
      for (Index r = first; r < last; r++) {
        const float *d = dy.data + r * channels, *from = x.data + r * channels;
        float* to = dx.data + r * channels;
        along(channels,
              [&](Index c) {
                store(to + c, load(s + c) * (load(d + c) - load(a + c) - (load(from + c) - load(m + c)) * load(t + c)));
              },
              [&](Index c) { to[c] = s[c] * (d[c] - a[c] - (from[c] - m[c]) * t[c]); });
      }
    });
  }

  static void add_sums(const float* dy, const float* x, const float* mean, Index first, Index last, Index channels,
                       float* own) {
    constexpr Index kRows = 64;
    std::vector<float> few(static_cast<size_t>(2 * channels));
    for (Index start = first; start < last; start += kRows) {
      std::fill(few.begin(), few.end(), 0.f);
      float *sum = few.data(), *along_x = few.data() + channels;
      for (Index r = start; r < std::min(start + kRows, last); r++) {
        const float *d = dy + r * channels, *row = x + r * channels;
        along(channels,
              [&](Index c) {
                const V g = load(d + c);
                store(sum + c, load(sum + c) + g);
                store(along_x + c, load(along_x + c) + g * (load(row + c) - load(mean + c)));
              },
              [&](Index c) {
                sum[c] += d[c];
                along_x[c] += d[c] * (row[c] - mean[c]);
              });
      }
      for (Index i = 0; i < 2 * channels; i++) own[i] += few[static_cast<size_t>(i)];
    }
  }

  float epsilon;
};

}  // namespace ONWARD_ISA
}  // namespace onward
