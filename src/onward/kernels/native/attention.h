// Attention without the matrix of scores in memory, and its gradient: blocks of queries and keys that stay cached.
#pragma once
#include <utility>

#include "functions.h"
#include "products.h"

namespace onward {
namespace ONWARD_ISA {

// ---- what attention is of --------------------------------------------------------------------------------------------

inline Index whole_vectors(Index count) { return ceiling(count, kLanes) * kLanes; }

// Vectors of each sample, head and position: [samples, heads, length, width], or with the length before the heads.
struct Heads {
  Index samples, heads, length, width;
  bool length_first;

  Heads(const std::vector<Index>& sizes, bool length_first) : length_first(length_first) {
    require(sizes.size() == 4, "attention is of tensors with four axes");
    samples = sizes[0], heads = sizes[length_first ? 2 : 1], length = sizes[length_first ? 1 : 2], width = sizes[3];
  }
  std::vector<Index> sizes() const {
    if (length_first) return {samples, length, heads, width};
    return {samples, heads, length, width};
  }
  Index row() const { return length_first ? heads * width : width; }
  Index first(Index task) const {  // task: sample * heads + head
    if (!length_first) return task * length * width;
    return (task / heads * length * heads + task % heads) * width;
  }
  Heads of_width(Index other) const {
    Heads copy = *this;
    copy.width = other;
    return copy;
  }
  // Rows of the given part behind each other, filled up with zeros to whole vectors.
  void copy(const float* from, Index begin, Index end, float* to) const {
    const Index wide = whole_vectors(width);
    for (Index i = begin; i < end; i++, to += wide) {
      std::copy(from + i * row(), from + i * row() + width, to);
      std::fill(to + width, to + wide, 0.f);
    }
  }
  // The same transposed and scaled: rows of `wide` positions.
  void transpose(const float* from, Index begin, Index end, float scale, Index wide, float* to) const {
    const Index count = end - begin;
    turn(from + begin * row(), row(), count, width, scale, to, wide);
    for (Index c = 0; c < width; c++) std::fill(to + c * wide + count, to + c * wide + whole_vectors(count), 0.f);
  }
};

// What is added to scores, broadcast to [samples, heads, queries, keys].
struct Mask {
  const float* data = nullptr;
  Index strides[4] = {0, 0, 0, 0}, heads = 1;

  Mask() = default;
  Mask(const Tensor<const float>& given, const Heads& q, const Heads& k) : data(given.data), heads(q.heads) {
    const Index wanted[4] = {q.samples, q.heads, q.length, k.length};
    require(given.sizes.size() <= 4, "a mask has four axes at most");
    Index stride = 1;
    for (size_t i = 0; i < given.sizes.size(); i++) {
      const Index n = given.sizes[given.sizes.size() - 1 - i];
      require(n == 1 || n == wanted[3 - i], "a mask does not fit queries and keys");
      strides[3 - i] = n == 1 ? 0 : stride;
      stride *= n;
    }
  }
  void add(Index task, Index query, Index key, Index count, float* row) const {
    const float* from =
        data + task / heads * strides[0] + task % heads * strides[1] + query * strides[2] + key * strides[3];
    if (strides[3] == 0)
      for (Index i = 0; i < count; i++) row[i] += *from;
    else
      for (Index i = 0; i < count; i++) row[i] += from[i];
  }
};

// What forward and backward pass share.
struct AttentionKernel : Kernel {
  explicit AttentionKernel(const Attributes& a)
      : scale(a.number("scale", 1)),
        causal(a.integer("causal", 0) != 0),
        guarded(a.integer("guarded", 0) != 0),
        length_first(a.integer("length_first", 0) != 0) {}

  static constexpr Index kQueries = 48, kKeys = 256;  // in a block

  struct Sizes {
    Heads q, k, v;
    Index wide, value_wide, keys;  // in whole vectors; of keys, those of all blocks
    Index tasks() const { return q.samples * q.heads; }
  };

  Sizes sizes_of(const Tensor<const float>& q, const Tensor<const float>& k, const Tensor<const float>& v) const {
    const Heads a(q.sizes, length_first), b(k.sizes, length_first), c(v.sizes, length_first);
    require(a.samples == b.samples && a.samples == c.samples && a.heads == b.heads && a.heads == c.heads &&
                a.width == b.width && b.length == c.length,
            "queries, keys and values do not go together");
    const Index rest = b.length % kKeys;
    return {a, b, c, whole_vectors(a.width), whole_vectors(c.width), b.length - rest + whole_vectors(rest)};
  }
  // How many keys of a block the queries before `last` see.
  Index seen(Index key, Index keys, Index last) const {
    const Index count = std::min(kKeys, keys - key);
    return causal ? std::min(count, std::max<Index>(last - key, 0)) : count;
  }
  // Transposed keys or values, block by block: a block begins at its first position times the width.
  static void transpose_blocks(const Heads& h, const float* from, float scale, float* to) {
    for (Index first = 0; first < h.length; first += kKeys) {
      const Index last = std::min(first + kKeys, h.length);
      h.transpose(from, first, last, scale, whole_vectors(last - first), to + first * h.width);
    }
  }

  float scale;
  bool causal, guarded, length_first;
};

// ---- forward ---------------------------------------------------------------------------------------------------------

struct Attention : AttentionKernel {  // q, k, v, mask -> y, and of each query the largest score and 1 / sum of exponentials
  using AttentionKernel::AttentionKernel;

  void compute(const Call& call) const override {
    const auto q = call.input(0), k = call.input(1), v = call.input(2), given = call.input(3);
    const Sizes s = sizes_of(q, k, v);
    const Mask mask = given ? Mask(given, s.q, s.k) : Mask();
    const Heads out = s.q.of_width(s.v.width);
    auto y = call.output(0, out.sizes()), sums = call.output(1, {s.q.samples, s.q.heads, s.q.length, 2});
    const Index parts = std::max<Index>(1, s.q.length / kQueriesOfTask), length = s.q.length;
    call.parallel(s.tasks() * parts, [&](Index i) {
      const Index task = i / parts, part = i % parts;
      attend(s, mask, task, length * part / parts, length * (part + 1) / parts, q.data + s.q.first(task),
             k.data + s.k.first(task), v.data + s.v.first(task), y.data + out.first(task), out.row(),
             sums.data + task * length * 2);
    });
  }

 private:
  static constexpr Index kQueriesOfTask = 256;

  void attend(const Sizes& s, const Mask& mask, Index task, Index first, Index last, const float* q, const float* k,
              const float* v, float* y, Index y_row, float* sums) const {
    const Index keys = s.k.length;
    float* turned = scratch(0, s.keys * (s.q.width + s.value_wide) + kQueries * (kKeys + s.value_wide + 2));
    float* values = turned + s.keys * s.q.width;
    float *scores = values + s.keys * s.value_wide, *mixed = scores + kQueries * kKeys;
    float *largest = mixed + kQueries * s.value_wide, *total = largest + kQueries;
    transpose_blocks(s.k, k, scale, turned);
    s.v.copy(v, 0, keys, values);
    for (Index query = first; query < last; query += kQueries) {
      const Index rows = std::min(kQueries, last - query);
      std::fill(mixed, mixed + rows * s.value_wide, 0.f);
      std::fill(largest, largest + rows, -kInfinity);
      std::fill(total, total + rows, 0.f);
      for (Index key = 0; key < keys; key += kKeys) {
        const Index columns = seen(key, keys, query + rows), wide = whole_vectors(columns);
        if (columns == 0) break;
        multiply({q + query * s.q.row(), s.q.row(), 1}, rows, turned + key * s.q.width,
                 whole_vectors(std::min(kKeys, keys - key)), scores, kKeys, wide, s.q.width, false);
        for (Index m = 0; m < rows; m++) {
          float* row = scores + m * kKeys;
          const Index visible = std::min(columns, seen(key, keys, query + m + 1));
          if (mask.data != nullptr) mask.add(task, query + m, key, visible, row);
          std::fill(row + visible, row + wide, -kInfinity);
          weigh(row, wide, largest[m], total[m], mixed + m * s.value_wide, s.value_wide);
        }
        multiply({scores, kKeys, 1}, rows, values + key * s.value_wide, s.value_wide, mixed, s.value_wide, s.value_wide,
                 columns, true);
      }
      for (Index m = 0; m < rows; m++) {
        const bool counts = keys > 0 && (!guarded || total[m] != 0);  // NaN is no hidden row
        const float inverse = counts ? 1 / total[m] : 0;
        sums[(query + m) * 2] = largest[m];
        sums[(query + m) * 2 + 1] = inverse;
        const float* from = mixed + m * s.value_wide;
        float* to = y + (query + m) * y_row;
        for (Index c = 0; c < s.v.width; c++) to[c] = counts ? from[c] * inverse : 0;
      }
    }
  }

  // Scores become exponentials of what is missing to the largest; what was summed up by a smaller one is made less.
  static void weigh(float* row, Index count, float& largest, float& total, float* mixed, Index width) {
    V most = all(largest);
    for (Index i = 0; i < count; i += kLanes) most = larger(load(row + i), most);
    const float now = largest_of(most), reference = now == -kInfinity ? 0 : now;  // all may be hidden so far
    V sums{};
    for (Index i = 0; i < count; i += kLanes) {
      const V weight = exp(load(row + i) - reference);
      store(row + i, weight);
      sums += weight;
    }
    if (now != largest && total != 0) {
      const float less = std::exp(largest - now);
      total *= less;
      for (Index c = 0; c < width; c += kLanes) store(mixed + c, load(mixed + c) * less);
    }
    total += total_of(sums);
    largest = now;
  }
};

// ---- backward --------------------------------------------------------------------------------------------------------

struct AttentionGradient : AttentionKernel {  // dy, q, k, v, y, sums, mask -> dq, dk, dv
  using AttentionKernel::AttentionKernel;

  void compute(const Call& call) const override {
    const auto dy = call.input(0), q = call.input(1), k = call.input(2), v = call.input(3), y = call.input(4);
    const auto sums = call.input(5), given = call.input(6);
    const Sizes s = sizes_of(q, k, v);
    const Mask mask = given ? Mask(given, s.q, s.k) : Mask();
    const Heads out = s.q.of_width(s.v.width);
    require(y.sizes == out.sizes() && dy.sizes == y.sizes && sums.size() == s.tasks() * s.q.length * 2,
            "a gradient of attention does not fit it");
    auto dq = call.output(0, q.sizes), dk = call.output(1, k.sizes), dv = call.output(2, v.sizes);
    call.parallel(s.tasks(), [&](Index task) {
      const Index at_q = s.q.first(task), at_k = s.k.first(task), at_v = s.v.first(task), at_y = out.first(task);
      pull_back(s, mask, out, task, {dy.data + at_y, q.data + at_q, k.data + at_k, v.data + at_v, y.data + at_y,
                                     sums.data + task * s.q.length * 2, dq.data + at_q, dk.data + at_k, dv.data + at_v});
    });
  }

 private:
  struct Of {  // one sample and head
    const float *dy, *q, *k, *v, *y, *sums;
    float *dq, *dk, *dv;
  };

  void pull_back(const Sizes& s, const Mask& mask, const Heads& out, Index task, const Of& of) const {
    const Index keys = s.k.length, both = s.wide + s.value_wide;
    float* memory = scratch(0, s.keys * (s.q.width + s.v.width + s.wide + both) + kQueries * (2 * kKeys + both + s.wide));
    const auto take = [&memory](Index count) { return std::exchange(memory, memory + count); };
    float *turned = take(s.keys * s.q.width), *turned_values = take(s.keys * s.v.width), *plain = take(s.keys * s.wide);
    float *dkeys = take(s.keys * s.wide), *dvalues = take(s.keys * s.value_wide);
    float *weights = take(kQueries * kKeys), *dscores = take(kQueries * kKeys);
    float *queries = take(kQueries * s.wide), *dqueries = take(kQueries * s.wide), *dy = take(kQueries * s.value_wide);
    transpose_blocks(s.k, of.k, scale, turned);
    transpose_blocks(s.v, of.v, 1, turned_values);
    s.k.copy(of.k, 0, keys, plain);
    std::fill(dkeys, dkeys + s.keys * both, 0.f);
    for (Index query = 0; query < s.q.length; query += kQueries) {
      const Index rows = std::min(kQueries, s.q.length - query);
      s.q.copy(of.q, query, query + rows, queries);
      out.copy(of.dy, query, query + rows, dy);
      std::fill(dqueries, dqueries + rows * s.wide, 0.f);
      float along[kQueries];
      for (Index m = 0; m < rows; m++) {
        const float *a = dy + m * s.value_wide, *b = of.y + (query + m) * out.row();
        V products{};
        Index c = 0;
        for (; c + kLanes <= out.width; c += kLanes) products += load(a + c) * load(b + c);
        if (c < out.width) products += load(a + c) * load_some(b + c, out.width - c);
        along[m] = total_of(products);
      }
      for (Index key = 0; key < keys; key += kKeys) {
        const Index columns = seen(key, keys, query + rows), wide = whole_vectors(columns);
        const Index block = whole_vectors(std::min(kKeys, keys - key));
        if (columns == 0) break;
        multiply({queries, s.wide, 1}, rows, turned + key * s.q.width, block, weights, kKeys, wide, s.q.width, false);
        multiply({dy, s.value_wide, 1}, rows, turned_values + key * s.v.width, block, dscores, kKeys, wide, s.v.width,
                 false);
        for (Index m = 0; m < rows; m++) {
          const Index visible = std::min(columns, seen(key, keys, query + m + 1));
          float *row = weights + m * kKeys, *slope = dscores + m * kKeys;
          if (mask.data != nullptr) mask.add(task, query + m, key, visible, row);
          const float largest = of.sums[(query + m) * 2], inverse = of.sums[(query + m) * 2 + 1];
          const Index counted = guarded && inverse == 0 ? 0 : visible;
          for (Index i = 0; i < counted; i += kLanes) {
            const V weight = exp(load(row + i) - largest) * inverse;
            store(row + i, weight);
            store(slope + i, weight * (load(slope + i) - along[m]) * scale);
          }
          std::fill(row + counted, row + columns, 0.f);
          std::fill(slope + counted, slope + columns, 0.f);
        }
        multiply({weights, 1, kKeys}, columns, dy, s.value_wide, dvalues + key * s.value_wide, s.value_wide,
                 s.value_wide, rows, true);
        multiply({dscores, 1, kKeys}, columns, queries, s.wide, dkeys + key * s.wide, s.wide, s.wide, rows, true);
        multiply({dscores, kKeys, 1}, rows, plain + key * s.wide, s.wide, dqueries, s.wide, s.wide, columns, true);
      }
      put(dqueries, rows, s.wide, s.q.width, of.dq + query * s.q.row(), s.q.row());
    }
    put(dkeys, keys, s.wide, s.k.width, of.dk, s.k.row());
    put(dvalues, keys, s.value_wide, s.v.width, of.dv, s.v.row());
  }

  static void put(const float* from, Index rows, Index wide, Index width, float* to, Index row) {
    for (Index i = 0; i < rows; i++) std::copy(from + i * wide, from + i * wide + width, to + i * row);
  }
};

}  // namespace ONWARD_ISA
}  // namespace onward
