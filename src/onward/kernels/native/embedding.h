// The gradient of a lookup.
#pragma once
#include "vectors.h"

namespace onward {
namespace ONWARD_ISA {

// Rows are added to those of a table of zeros that indices name, in their order. Ranges of the table are filled by one
// thread each, so that no row is written by two.
struct LookupGradient : Kernel {  // indices, rows, the sizes of the table
  explicit LookupGradient(const Attributes&) {}
  void compute(const Call& call) const override {
    const auto indices = call.indices(0), sizes = call.indices(2);
    const auto rows = call.input(1);
    const std::vector<Index> shape(sizes.data, sizes.data + sizes.size());
    require(!shape.empty(), "a table has rows");
    auto table = call.output(0, shape);
    const Index count = shape[0], width = count == 0 ? 0 : table.size() / count;
    require(rows.size() == indices.size() * width, "there is a row for each index");
    std::vector<Index> place(static_cast<size_t>(indices.size()));
    for (Index i = 0; i < indices.size(); i++) {
      const Index at = indices.data[i] < 0 ? indices.data[i] + count : indices.data[i];
      require(at >= 0 && at < count, "an index is not one of the table's");
      place[static_cast<size_t>(i)] = at;
    }
    split(call, count, (1 << 16) / std::max<Index>(width, 1) + 1, [&](Index first, Index last) {
      std::fill(table.data + first * width, table.data + last * width, 0.f);
      for (size_t i = 0; i < place.size(); i++) {
        if (place[i] < first || place[i] >= last) continue;
        float* to = table.data + place[i] * width;
        const float* from = rows.data + static_cast<Index>(i) * width;
        for (Index c = 0; c < width; c++) to[c] += from[c];
      }
    });
  }
};

}  // namespace ONWARD_ISA
}  // namespace onward
