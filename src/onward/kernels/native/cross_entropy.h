// Cross entropy of rows of scores with the indices of their classes, and its gradient, without a matrix of probabilities.
#pragma once
#include "row_normalization.h"

namespace onward {
namespace ONWARD_ISA {

// What forward and backward pass share: scores [rows, classes], labels [rows], and weights of classes or none.
struct CrossEntropyKernel : Kernel {
  explicit CrossEntropyKernel(const Attributes& a)
      : ignored(a.integer("ignore_index", -1)),
        ignores(a.integer("ignores", 0) != 0),
        averages(a.integer("mean", 1) != 0) {}

  struct Given {
    Tensor<const float> scores;
    Tensor<const Index> labels;
    Tensor<const float> weights;
    Rows rows;
  };

  Given given(const Call& call, size_t first) const {
    auto scores = call.input(first), weights = call.input(first + 2);
    auto labels = call.indices(first + 1);
    require(scores.sizes.size() == 2 && labels.size() == scores.sizes[0], "each row of scores has a label");
    require(!weights || weights.size() == scores.sizes[1], "each class has a weight");
    const Rows rows(scores.sizes, 1);
    for (Index r = 0; r < rows.count; r++)
      require(is_ignored(labels.data[r]) || (labels.data[r] >= 0 && labels.data[r] < rows.length),
              "a label is the index of no class: out of bounds");
    return {scores, labels, weights, rows};
  }
  bool is_ignored(Index label) const { return ignores && label == ignored; }
  float weight(const Given& g, Index row) const {
    const Index label = g.labels.data[row];
    return is_ignored(label) ? 0 : g.weights ? g.weights.data[label] : 1;
  }
  double total(const Given& g) const {
    if (!averages) return 1;
    double sum = 0;
    for (Index r = 0; r < g.rows.count; r++) sum += weight(g, r);
    return sum;
  }

  Index ignored;
  bool ignores, averages;
};

struct CrossEntropy : CrossEntropyKernel {  // scores, labels, weights -> loss, logarithms of the sums of exponentials
  using CrossEntropyKernel::CrossEntropyKernel;

  void compute(const Call& call) const override {
    const Given g = given(call, 0);
    auto loss = call.output(0, {}), logarithms = call.output(1, {g.rows.count});
    split(call, g.rows.count, g.rows.least(), [&](Index first, Index last) {
      for (Index r = first; r < last; r++) logarithms.data[r] = logarithm(g.scores.data + r * g.rows.length, g.rows.length);
    });
    double sum = 0;
    for (Index r = 0; r < g.rows.count; r++) {
      const Index label = g.labels.data[r];
      if (is_ignored(label)) continue;
      sum += weight(g, r) * (static_cast<double>(logarithms.data[r]) - g.scores.data[r * g.rows.length + label]);
    }
    *loss.data = static_cast<float>(sum / total(g));
  }

  static float logarithm(const float* row, Index length) {
    V most = all(-kInfinity);
    Index i = 0;
    for (; i + kLanes <= length; i += kLanes) most = larger(load(row + i), most);
    float largest = largest_of(most);
    for (; i < length; i++) largest = row[i] > largest ? row[i] : largest;
    V sums{};
    for (i = 0; i + kLanes <= length; i += kLanes) sums += exp(load(row + i) - largest);
    float total = total_of(sums);
    if (i < length) {
      const V rest = exp(load_some(row + i, length - i) - largest);
      for (int lane = 0; i < length; i++, lane++) total += rest[lane];
    }
    return largest + std::log(total);
  }
};

struct CrossEntropyGradient : CrossEntropyKernel {  // dloss, logarithms, scores, labels, weights -> dscores
  using CrossEntropyKernel::CrossEntropyKernel;

  void compute(const Call& call) const override {
    const auto dloss = call.input(0), logarithms = call.input(1);
    const Given g = given(call, 2);
    require(dloss.size() == 1 && logarithms.size() == g.rows.count, "a gradient of cross entropy does not fit it");
    auto dscores = call.output(0, g.scores.sizes);
    const float each = static_cast<float>(*dloss.data / total(g));
    split(call, g.rows.count, g.rows.least(), [&](Index first, Index last) {
      for (Index r = first; r < last; r++) {
        const float* row = g.scores.data + r * g.rows.length;
        float* to = dscores.data + r * g.rows.length;
        const Index label = g.labels.data[r];
        if (is_ignored(label)) {
          // 0 times a softmax: NaN where the scores have none, as without kernels and in PyTorch.
          std::fill(to, to + g.rows.length, std::isfinite(logarithms.data[r]) ? 0.f : std::nanf(""));
          continue;
        }
        const float share = each * weight(g, r), logarithm = logarithms.data[r];
        write_along(to, g.rows.length, [&](auto read) { return exp(read(row) - logarithm) * share; });
        to[label] -= share;
      }
    });
  }
};

}  // namespace ONWARD_ISA
}  // namespace onward
