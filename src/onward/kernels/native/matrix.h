// What weight gradients are made of: a transposed matrix times a matrix, and sums of rows. What a number is summed up
// from, and in which order, depends on sizes alone, never on the number of threads.
#pragma once
#include "products.h"

namespace onward {
namespace ONWARD_ISA {

// ---- a transposed matrix times a matrix: both are read along their rows ----------------------------------------------

constexpr Index kDepth = 1024;  // rows that are packed at once
constexpr Index kMostColumns = 4096;  // of each matrix: more would crowd caches, and memory
constexpr Index kPanel = 24;  // columns of the first, rows of the result: a multiple of all that `outer_rows` says
constexpr Index kPanels = 8;  // that are packed by a task: rows are read in long pieces
constexpr Index kTasks = 64;  // enough to keep threads busy to the end

// For each row, as many numbers as a panel is wide, filled up with zeros; one panel after the other.
inline void pack_panels(const float* a, Index stride, Index depth, Index count, float* to) {
  for (Index k = 0; k < depth; k++, a += stride)
    for (Index c = 0; c < count; c += kPanel) {
      float* panel = to + c * depth + k * kPanel;
      if (c + kPanel <= count)
        std::copy(a + c, a + c + kPanel, panel);
      else
        std::fill(std::copy(a + c, a + count, panel), panel + kPanel, 0.f);
    }
}

inline void pack_tile(const Packed& packed, size_t tile, const float* b, Index stride) {
  const Tile& t = packed.tiles[tile];
  float* to = packed.data + packed.offset(tile);
  for (Index k = 0; k < packed.length; k++, to += t.width()) {
    const float* row = b + k * stride + t.first;
    std::fill(std::copy(row, row + t.count, to), to + t.width(), 0.f);
  }
}

// A panel times a tile goes to `out`, which is their place in the result.
inline void multiply_panel(const float* panel, Index rows, const Packed& packed, size_t tile, float* out, Index stride,
                           bool adds) {
  const Tile& t = packed.tiles[tile];
  AddOuterProducts add;
  const int at_once = outer_step(t.vectors, kPanel, &add);
  float sums[kPanel * kMostVectors * kLanes];
  for (Index row = 0; row < rows; row += at_once) {
    std::fill(sums, sums + at_once * t.width(), 0.f);
    const Segment all_rows{panel + row, packed.data + packed.offset(tile), packed.length};
    add(&all_rows, 1, kPanel, t.width(), sums, t.width());
    for (Index m = 0; m < std::min<Index>(at_once, rows - row); m++) {
      const float* from = sums + m * t.width();
      float* to = out + (row + m) * stride;
      for (Index c = 0; c < t.count; c++) to[c] = adds ? to[c] + from[c] : from[c];
    }
  }
}

// out[m][n] = sum over k of a[k][m] * b[k][n]
inline void multiply_transposed(const Call& call, const float* a, Index rows, Index depth, const float* b,
                                Index columns, float* out) {
  const Index pieces = ceiling(depth, kDepth), most_rows = kMostColumns / kPanel * kPanel;
  for (Index piece = 0; piece < pieces; piece++)
    for (Index first_row = 0; first_row < rows; first_row += most_rows) {
      const Index k = depth * piece / pieces, length = depth * (piece + 1) / pieces - k;
      const Index row_count = std::min(most_rows, rows - first_row), panels = ceiling(row_count, kPanel);
      float* packed_a = scratch(1, panels * kPanel * length);
      call.parallel(ceiling(panels, kPanels), [&](Index i) {
        const Index row = i * kPanels * kPanel, count = std::min(kPanels * kPanel, row_count - row);
        pack_panels(a + k * rows + first_row + row, rows, length, count, packed_a + row * length);
      });
      for (Index first = 0; first < columns; first += kMostColumns) {
        const Index count = std::min(kMostColumns, columns - first);
        const Packed packed{tiles_of(count), 1, length, scratch(0, Packed::size(count, 1, length))};
        const Index tiles = static_cast<Index>(packed.tiles.size()), groups = std::min(panels, ceiling(kTasks, tiles));
        call.parallel(tiles,
                      [&](Index i) { pack_tile(packed, static_cast<size_t>(i), b + k * columns + first, columns); });
        call.parallel(tiles * groups, [&](Index task) {
          const size_t tile = static_cast<size_t>(task / groups);
          const Index group = task % groups;
          for (Index p = panels * group / groups; p < panels * (group + 1) / groups; p++) {
            const Index row = p * kPanel;
            multiply_panel(packed_a + row * length, std::min(kPanel, row_count - row), packed, tile,
                           out + (first_row + row) * columns + first + packed.tiles[tile].first, columns, piece > 0);
          }
        });
      }
    }
}

struct TransposedProduct : Kernel {  // two matrices with as many rows; other axes than the last are rows, too
  explicit TransposedProduct(const Attributes&) {}
  void compute(const Call& call) const override {
    const auto a = call.input(0), b = call.input(1);
    require(a.sizes.size() >= 2 && b.sizes.size() >= 2, "a product has matrices");
    const auto rows_in = [](const std::vector<Index>& sizes) {
      Index rows = 1;
      for (size_t i = 0; i + 1 < sizes.size(); i++) rows *= sizes[i];
      return rows;
    };
    const Index depth = rows_in(a.sizes), rows = a.sizes.back(), columns = b.sizes.back();
    require(depth == rows_in(b.sizes), "matrices of a product have different rows");
    auto out = call.output(0, {rows, columns});
    if (depth == 0)
      std::fill(out.data, out.data + out.size(), 0.f);
    else if (out.size() > 0)
      multiply_transposed(call, a.data, rows, depth, b.data, columns, out.data);
  }
};

// ---- sums of rows ----------------------------------------------------------------------------------------------------

struct LeadingSum : Kernel {  // over the first `axes` axes
  explicit LeadingSum(const Attributes& attributes) : axes(attributes.integer("axes", 1)) {}
  void compute(const Call& call) const override {
    const auto x = call.input(0);
    require(axes >= 0 && static_cast<size_t>(axes) <= x.sizes.size(), "there are no such axes to sum over");
    Index rows = 1;
    for (Index i = 0; i < axes; i++) rows *= x.sizes[static_cast<size_t>(i)];
    auto out = call.output(0, {x.sizes.begin() + axes, x.sizes.end()});
    const Index columns = out.size();
    if (columns > rows * kFewRows) {
      split(call, columns, kLeast / std::max<Index>(rows, 1) + 1,
            [&](Index first, Index last) { add_up(x.data + first, columns, 0, rows, last - first, out.data + first); });
    } else if (columns > 0) {  // parts of the rows have sums of their own, which are added in order
      const Index parts = std::max<Index>(1, std::min<Index>({kTasks, x.size() / kLeast, rows}));
      float* sums = scratch(0, parts * columns);
      call.parallel(parts, [&](Index i) {
        add_up(x.data, columns, rows * i / parts, rows * (i + 1) / parts, columns, sums + i * columns);
      });
      add_up(sums, columns, 0, parts, columns, out.data);
    }
  }

 private:
  static constexpr Index kFewRows = 16, kLeast = 1 << 15;

  static void add_up(const float* x, Index stride, Index first, Index last, Index count, float* to) {
    std::fill(to, to + count, 0.f);
    for (; first + 4 <= last; first += 4) add_rows<4>(x + first * stride, stride, count, to);
    for (; first < last; first++) add_rows<1>(x + first * stride, stride, count, to);
  }

  template <int rows>
  static void add_rows(const float* x, Index stride, Index count, float* to) {
    Index i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      V total = load(x + i);
      for (int row = 1; row < rows; row++) total += load(x + row * stride + i);
      store(to + i, load(to + i) + total);
    }
    for (; i < count; i++) {
      float total = x[i];
      for (int row = 1; row < rows; row++) total += x[row * stride + i];
      to[i] += total;
    }
  }

  Index axes;
};

}  // namespace ONWARD_ISA
}  // namespace onward
