// Gradients of what treats rows alike: LayerNormalization, RMSNormalization, Softmax and LogSoftmax over the last axes.
#pragma once
#include "functions.h"
#include "normalization.h"

namespace onward {
namespace ONWARD_ISA {

// A tensor as rows: all axes from one on are a row.
struct Rows {
  Index count = 1, length = 1;
  Rows(const std::vector<Index>& sizes, Index axis) {
    const Index rank = static_cast<Index>(sizes.size());
    axis = axis < 0 ? axis + rank : axis;
    require(axis >= 0 && axis < rank, "there is no such axis");
    for (Index i = 0; i < rank; i++) (i < axis ? count : length) *= sizes[static_cast<size_t>(i)];
  }
  Index least() const { return std::max<Index>(1, 16384 / std::max<Index>(length, 1)); }  // rows worth a task
};

// The sum of f(i, read) over a row, f of a vector at i; what is behind the end counts as f of zeros, which must be 0.
template <class F>
float sum_along(Index length, const F& f) {
  V sums{};
  Index i = 0;
  for (; i + kLanes <= length; i += kLanes) sums += f([i](const float* p) { return load(p + i); });
  if (i < length) sums += f([i, length](const float* p) { return load_some(p + i, length - i); });
  return total_of(sums);
}

// Writes f(read) of each vector of a row.
template <class F>
void write_along(float* to, Index length, const F& f) {
  Index i = 0;
  for (; i + kLanes <= length; i += kLanes) store(to + i, f([i](const float* p) { return load(p + i); }));
  if (i < length) store_some(to + i, f([i, length](const float* p) { return load_some(p + i, length - i); }), length - i);
}

template <bool centred>
struct RowNormalizationGradient : Kernel {  // dy, x, scale, and if centred mean and 1 / deviation -> dx, dscale, dbias
  explicit RowNormalizationGradient(const Attributes& a) : axis(a.integer("axis", -1)), epsilon(a.number("epsilon", 1e-5f)) {}

  void compute(const Call& call) const override {
    const auto dy = call.input(0), x = call.input(1), scale = call.input(2);
    const auto mean = call.input(3), inverse = call.input(4);
    const Rows rows(x.sizes, axis);
    require(dy.sizes == x.sizes && scale.size() == rows.length, "a normalization does not fit its gradient");
    require(!centred || (mean.size() == rows.count && inverse.size() == rows.count), "statistics are of each row");
    auto dx = call.output(0, x.sizes), dscale = call.output(1, scale.sizes);
    auto dbias = centred ? call.output(2, scale.sizes) : Tensor<float>();
    std::vector<double> totals(static_cast<size_t>(2 * rows.length));
    sum_rows<2>(call, rows.count, rows.length, totals.data(), [&](Index first, Index last, float* own) {
      constexpr Index kRows = 64;  // a sum of floats as long as this, then one of these
      std::vector<float> few(static_cast<size_t>(2 * rows.length));
      for (Index start = first; start < last; start += kRows) {
        std::fill(few.begin(), few.end(), 0.f);
        for (Index r = start; r < std::min(start + kRows, last); r++) {
          const float *d = dy.data + r * rows.length, *from = x.data + r * rows.length;
          const float middle = centred ? mean.data[r] : 0, slope = centred ? inverse.data[r] : inverse_of(from, rows.length);
          pull_back(d, from, scale.data, middle, slope, rows.length, dx.data + r * rows.length, few.data());
        }
        for (Index i = 0; i < 2 * rows.length; i++) own[i] += few[static_cast<size_t>(i)];
      }
    });
    for (Index i = 0; i < rows.length; i++) {
      dscale.data[i] = static_cast<float>(totals[static_cast<size_t>(i)]);
      if (dbias) dbias.data[i] = static_cast<float>(totals[static_cast<size_t>(rows.length + i)]);
    }
  }

 private:
  float inverse_of(const float* x, Index length) const {
    const float squares = sum_along(length, [&](auto read) { return read(x) * read(x); });
    return 1 / std::sqrt(squares / static_cast<float>(length) + epsilon);
  }

  // dx = inverse (dn - mean(dn) - n mean(dn n)), dn = dy scale, n = (x - mean) inverse
  static void pull_back(const float* dy, const float* x, const float* scale, float mean, float inverse, Index length,
                        float* dx, float* sums) {
    const float share = 1 / static_cast<float>(length);
    const float shift =
        centred ? share * sum_along(length, [&](auto read) { return read(dy) * read(scale); }) : 0;
    const float tilt = share * inverse * sum_along(length, [&](auto read) {
      return read(dy) * read(scale) * (read(x) - mean);
    });
    write_along(dx, length, [&](auto read) {
      return inverse * (read(dy) * read(scale) - shift - (read(x) - mean) * inverse * tilt);
    });
    write_along(sums, length, [&](auto read) { return read(sums) + read(dy) * ((read(x) - mean) * inverse); });
    if (centred) write_along(sums + length, length, [&](auto read) { return read(sums + length) + read(dy); });
  }

  Index axis;
  float epsilon;
};

template <bool logarithm>
struct SoftmaxGradient : Kernel {  // dy, y -> dx, over the last axis
  explicit SoftmaxGradient(const Attributes&) {}

  void compute(const Call& call) const override {
    const auto dy = call.input(0), y = call.input(1);
    const Rows rows(y.sizes, -1);
    require(dy.sizes == y.sizes, "a gradient has the shape of what it is of");
    auto dx = call.output(0, y.sizes);
    split(call, rows.count, rows.least(), [&](Index first, Index last) {
      for (Index r = first; r < last; r++) {
        const float *d = dy.data + r * rows.length, *p = y.data + r * rows.length;
        float* to = dx.data + r * rows.length;
        if constexpr (logarithm) {
          const float total = sum_along(rows.length, [&](auto read) { return read(d); });
          write_along(to, rows.length, [&](auto read) { return read(d) - exp(read(p)) * total; });
        } else {
          const float total = sum_along(rows.length, [&](auto read) { return read(d) * read(p); });
          write_along(to, rows.length, [&](auto read) { return read(p) * (read(d) - total); });
        }
      }
    });
  }
};

}  // namespace ONWARD_ISA
}  // namespace onward
