// Products of matrices, as layers and their gradients have them, and sums of rows. What a number is summed up from, and
// in which order, depends on sizes alone, never on the number of threads.
#pragma once
#include "products.h"

namespace onward {
namespace ONWARD_ISA {

// ---- matrices, in pieces that stay in caches -------------------------------------------------------------------------

constexpr Index kDepth = 1024;  // numbers of a sum that are multiplied at once
constexpr Index kStrip = 64;  // columns that are packed together: with that depth, they fit into the second cache
constexpr Index kMostColumns = 4096;  // that are packed for all threads: more would crowd caches, and memory
constexpr Index kTasks = 24;  // enough to keep threads busy to the end
constexpr Index kRowsAtOnce = 24;  // that stay in the first cache for all tiles of a strip: a multiple of all `rows_of`

// A matrix whose rows are `stride` apart; `is_turned` if what is meant is its transpose.
struct Matrix {
  const float* data;
  Index stride;
  bool is_turned;

  const float* at(Index row, Index column) const {
    return data + (is_turned ? column * stride + row : row * stride + column);
  }
};

// The piece of `columns` columns from `column` on that is `length` rows high and begins with row k.
inline Packed pack_strip(const Matrix& b, Index k, Index length, Index column, Index columns, float* to) {
  Packed packed{tiles_of(columns), 1, length, to};
  for (size_t i = 0; i < packed.tiles.size(); i++) {
    const Tile& tile = packed.tiles[i];
    const float* from = b.at(k, column + tile.first);
    float* row = to + packed.offset(i);
    if (b.is_turned) {
      if (tile.count < tile.width()) std::fill(row, row + length * tile.width(), 0.f);
      turn(from, b.stride, tile.count, length, 1, row, tile.width());
    } else {
      for (Index j = 0; j < length; j++, from += b.stride, row += tile.width())
        std::fill(std::copy(from, from + tile.count, row), row + tile.width(), 0.f);
    }
  }
  return packed;
}

// Rows times a strip: that goes to `out`, where their product begins, or is added to it.
inline void multiply_strip(const float* a, Index stride, Index rows, const Packed& strip, float* out, Index out_stride,
                           bool adds, const float* bias) {
  Run run;
  float* to[kMostRows];
  for (Index first = 0; first < rows; first += kRowsAtOnce)
    for (size_t i = 0; i < strip.tiles.size(); i++) {
      const Tile& tile = strip.tiles[i];
      const Index step = rows_of(tile.vectors), last = std::min(first + kRowsAtOnce, rows);
      run.weights = strip.data + strip.offset(i);
      for (Index row = first; row < last; row += step) {
        const Index valid = std::min(step, last - row);
        for (Index m = 0; m < step; m++) {  // beyond the last one, that again, for nothing
          const Index at = row + std::min(m, valid - 1);
          run.rows[m] = a + at * stride;
          to[m] = out + at * out_stride + tile.first;
        }
        multiply_rows_of(tile.vectors)(&run, 1, strip.length, to, valid, tile.count, adds,
                                       bias == nullptr ? nullptr : bias + tile.first);
      }
    }
}

struct Sizes {
  Index rows, depth, columns;
  Index pieces() const { return ceiling(depth, kDepth); }
  Index begin(Index piece) const { return depth * piece / pieces(); }
};

// out = a b + bias, a being rows as they are. Each task packs a strip of b, which many rows are worth.
inline void multiply(const Call& call, const Sizes& n, const float* a, const Matrix& b, const float* bias, float* out) {
  constexpr Index kFewest = 192;
  const Index strips = ceiling(n.columns, kStrip);
  const Index groups = std::max<Index>(1, std::min(ceiling(kTasks, strips), n.rows / kFewest));
  call.parallel(strips * groups, [&](Index task) {
    const Index column = task / groups * kStrip, columns = std::min(kStrip, n.columns - column);
    const Index row = n.rows * (task % groups) / groups, rows = n.rows * (task % groups + 1) / groups - row;
    for (Index piece = 0; piece < n.pieces(); piece++) {
      const Index k = n.begin(piece), length = n.begin(piece + 1) - k;
      const Packed strip = pack_strip(b, k, length, column, columns, scratch(0, Packed::size(columns, 1, length)));
      multiply_strip(a + row * n.depth + k, n.depth, rows, strip, out + row * n.columns + column, n.columns, piece > 0,
                     bias == nullptr ? nullptr : bias + column);
    }
  });
}

constexpr Index kPanel = 24;  // columns of the first, rows of the result: a multiple of all that `outer_rows` says

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

// out = aᵀ b. Strips of b are packed once for all, and each task packs some columns of a.
inline void multiply_transposed(const Call& call, const Sizes& n, const float* a, const float* b, float* out) {
  constexpr Index kPanelsOfTask = 4, kFewestTasks = 8;
  const Index panels = ceiling(n.rows, kPanel);
  const Index groups = std::max(std::min(panels, kTasks), ceiling(panels, kPanelsOfTask));
  for (Index piece = 0; piece < n.pieces(); piece++)
    for (Index first = 0; first < n.columns; first += kMostColumns) {
      const Index k = n.begin(piece), length = n.begin(piece + 1) - k;
      const Index width = std::min(kMostColumns, n.columns - first), strips = ceiling(width, kStrip);
      float* packed = scratch(0, strips * Packed::size(kStrip, 1, length));
      std::vector<Packed> strip(static_cast<size_t>(strips));
      call.parallel(strips, [&](Index i) {
        strip[static_cast<size_t>(i)] =
            pack_strip({b, n.columns, false}, k, length, first + i * kStrip, std::min(kStrip, width - i * kStrip),
                       packed + i * Packed::size(kStrip, 1, length));
      });
      const Index parts = std::min(strips, ceiling(kFewestTasks, groups));
      call.parallel(groups * parts, [&](Index task) {
        const Index row = panels * (task / parts) / groups * kPanel;
        const Index rows = std::min(panels * (task / parts + 1) / groups * kPanel, n.rows) - row, part = task % parts;
        float* own = scratch(1, ceiling(rows, kPanel) * kPanel * length);
        pack_panels(a + k * n.rows + row, n.rows, length, rows, own);
        for (Index i = strips * part / parts; i < strips * (part + 1) / parts; i++) {
          const Packed& s = strip[static_cast<size_t>(i)];
          for (size_t tile = 0; tile < s.tiles.size(); tile++)
            for (Index m = 0; m < rows; m += kPanel)
              multiply_panel(own + m * length, std::min(kPanel, rows - m), s, tile,
                             out + (row + m) * n.columns + first + i * kStrip + s.tiles[tile].first, n.columns,
                             piece > 0);
        }
      });
    }
}

// All axes but the last are rows.
inline Index rows_in(const std::vector<Index>& sizes) {
  Index rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); i++) rows *= sizes[i];
  return rows;
}

struct Product : Kernel {  // of rows with a matrix, or its transpose, and with a bias
  explicit Product(const Attributes& attributes) : is_turned(attributes.integer("turned", 0) != 0) {}
  void compute(const Call& call) const override {
    const auto a = call.input(0), b = call.input(1), bias = call.input(2);
    require(!a.sizes.empty() && b.sizes.size() == 2, "a product has rows and a matrix");
    const Sizes n{rows_in(a.sizes), b.sizes[is_turned], b.sizes[!is_turned]};
    require(a.sizes.back() == n.depth, "rows of a product are not as long as the matrix is high");
    require(!bias || bias.size() == n.columns, "the bias of a product has a number for each column");
    auto sizes = a.sizes;
    sizes.back() = n.columns;
    auto out = call.output(0, sizes);
    if (out.size() == 0) return;
    if (n.depth > 0)
      multiply(call, n, a.data, {b.data, b.sizes[1], is_turned}, bias.data, out.data);
    else
      for (Index row = 0; row < n.rows; row++)
        for (Index i = 0; i < n.columns; i++) out.data[row * n.columns + i] = bias ? bias.data[i] : 0.f;
  }

 private:
  bool is_turned;
};

struct TransposedProduct : Kernel {  // of two matrices with as many rows, the first one transposed
  explicit TransposedProduct(const Attributes&) {}
  void compute(const Call& call) const override {
    const auto a = call.input(0), b = call.input(1);
    require(a.sizes.size() >= 2 && b.sizes.size() >= 2, "a product has matrices");
    const Sizes n{a.sizes.back(), rows_in(a.sizes), b.sizes.back()};
    require(n.depth == rows_in(b.sizes), "matrices of a product have different rows");
    auto out = call.output(0, {n.rows, n.columns});
    if (n.depth == 0)
      std::fill(out.data, out.data + out.size(), 0.f);
    else if (out.size() > 0)
      multiply_transposed(call, n, a.data, b.data, out.data);
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
