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

// A sum that is long is multiplied in pieces.
struct Pieces {
  Index depth;
  Index count() const { return ceiling(depth, kDepth); }
  Index begin(Index piece) const { return depth * piece / count(); }
};

// Rows as they are, one after another, times a matrix.
struct Term {
  const float* a;
  Index depth;
  Matrix b;
};

// out = bias + the sum of all terms. Each task packs strips of their matrices, which many rows are worth.
inline void multiply(const Call& call, const std::vector<Term>& terms, const float* bias, Index all_rows,
                     Index all_columns, float* out) {
  constexpr Index kFewest = 192;
  const Index strips = ceiling(all_columns, kStrip);
  const Index groups = std::max<Index>(1, std::min(ceiling(kTasks, strips), all_rows / kFewest));
  call.parallel(strips * groups, [&](Index task) {
    const Index column = task / groups * kStrip, columns = std::min(kStrip, all_columns - column);
    const Index row = all_rows * (task % groups) / groups, rows = all_rows * (task % groups + 1) / groups - row;
    bool adds = false;
    for (const Term& term : terms) {
      const Pieces pieces{term.depth};
      for (Index piece = 0; piece < pieces.count(); piece++, adds = true) {
        const Index k = pieces.begin(piece), length = pieces.begin(piece + 1) - k;
        float* packed = scratch(0, Packed::size(columns, 1, length));
        const Packed strip = pack_strip(term.b, k, length, column, columns, packed);
        multiply_strip(term.a + row * term.depth + k, term.depth, rows, strip, out + row * all_columns + column,
                       all_columns, adds, bias == nullptr ? nullptr : bias + column);
      }
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

struct Sizes {
  Index rows, depth, columns;
};

// out = aᵀ b. Strips of b are packed for all, as many as caches hold, and each task packs some columns of a.
inline void multiply_transposed(const Call& call, const Sizes& n, const float* a, const float* b, float* out) {
  constexpr Index kPanelsOfTask = 4, kFewestTasks = 8;
  const Index panels = ceiling(n.rows, kPanel);
  const Index groups = std::max(std::min(panels, kTasks), ceiling(panels, kPanelsOfTask));
  const Pieces pieces{n.depth};
  for (Index first = 0; first < n.columns; first += kMostColumns) {
    const Index width = std::min(kMostColumns, n.columns - first), strips = ceiling(width, kStrip);
    const Index parts = std::min(strips, ceiling(kFewestTasks, groups));
    const Index at_once = kMostColumns / kStrip / strips;  // pieces
    for (Index begin = 0, end; begin < pieces.count(); begin = end) {
      end = std::min(begin + at_once, pieces.count());
      std::vector<Packed> packed(static_cast<size_t>((end - begin) * strips));
      const auto strip = [&](Index piece, Index i) -> Packed& {
        return packed[static_cast<size_t>((piece - begin) * strips + i)];
      };
      float* to = scratch(0, (end - begin) * strips * kDepth * kStrip);
      call.parallel((end - begin) * strips, [&](Index task) {
        const Index piece = begin + task / strips, i = task % strips, k = pieces.begin(piece);
        strip(piece, i) = pack_strip({b, n.columns, false}, k, pieces.begin(piece + 1) - k, first + i * kStrip,
                                     std::min(kStrip, width - i * kStrip), to + task * kDepth * kStrip);
      });
      call.parallel(groups * parts, [&](Index task) {
        const Index row = panels * (task / parts) / groups * kPanel, part = task % parts;
        const Index rows = std::min(panels * (task / parts + 1) / groups * kPanel, n.rows) - row;
        for (Index piece = begin; piece < end; piece++) {
          const Index k = pieces.begin(piece), length = pieces.begin(piece + 1) - k;
          float* own = scratch(1, ceiling(rows, kPanel) * kPanel * length);
          pack_panels(a + k * n.rows + row, n.rows, length, rows, own);
          for (Index i = strips * part / parts; i < strips * (part + 1) / parts; i++) {
            const Packed& s = strip(piece, i);
            for (size_t tile = 0; tile < s.tiles.size(); tile++)
              for (Index m = 0; m < rows; m += kPanel)
                multiply_panel(own + m * length, std::min(kPanel, rows - m), s, tile,
                               out + (row + m) * n.columns + first + i * kStrip + s.tiles[tile].first, n.columns,
                               piece > 0);
          }
        }
      });
    }
  }
}

constexpr Index kNarrow = 16;  // columns for which all sums of a task fit into a cache

// sums += a tile of some rows of a wide matrix, transposed, times as many of a narrow one, which stand in columns there.
// Nothing is packed, but for vectors that would end beyond the last row.
inline void add_narrow(const Matrix& wide, const Matrix& narrow, Index k, Index length, const Tile& tile, float* sums) {
  Segment rows{nullptr, wide.at(k, tile.first), length};
  Index width = wide.stride;
  if (tile.count < tile.width()) {
    width = tile.width();
    rows.y = pack_strip(wide, k, length, tile.first, tile.count, scratch(1, width * length)).data;
  }
  AddOuterProducts add;
  for (Index first = 0, count; first < narrow.stride; first += count) {
    count = outer_step(tile.vectors, narrow.stride - first, &add);
    rows.x = narrow.at(k, first);
    add(&rows, 1, narrow.stride, width, sums + first * tile.width(), tile.width());
  }
}

// wideᵀ narrow, or its transpose: number (i, j) goes to out[i * row + j * column].
inline void multiply_narrow(const Call& call, Index depth, const Matrix& wide, const Matrix& narrow, float* out,
                            Index row, Index column) {
  constexpr Index kBlock = 64;  // rows in which all columns of a task are read before the next ones are
  const std::vector<Tile> tiles = tiles_of(wide.stride);
  const Index columns = narrow.stride, count = static_cast<Index>(tiles.size()), tasks = std::min(count, kTasks);
  const Pieces pieces{depth};
  call.parallel(tasks, [&](Index task) {
    const Index first = count * task / tasks, last = count * (task + 1) / tasks;
    float* all_sums = scratch(0, columns * (last - first) * kMostVectors * kLanes);
    const auto each_tile = [&](const auto& function) {
      for (Index i = first; i < last; i++)
        function(tiles[static_cast<size_t>(i)], all_sums + columns * (i - first) * kMostVectors * kLanes);
    };
    for (Index piece = 0; piece < pieces.count(); piece++) {
      each_tile([&](const Tile& tile, float* sums) { std::fill(sums, sums + columns * tile.width(), 0.f); });
      for (Index k = pieces.begin(piece), end = pieces.begin(piece + 1); k < end; k += kBlock)
        each_tile([&](const Tile& tile, float* sums) {
          add_narrow(wide, narrow, k, std::min(kBlock, end - k), tile, sums);
        });
      each_tile([&](const Tile& tile, const float* sums) {
        for (Index j = 0; j < columns; j++)
          for (Index i = 0; i < tile.count; i++) {
            float& to = out[(tile.first + i) * row + j * column];
            to = (piece > 0 ? to : 0.f) + sums[j * tile.width() + i];
          }
      });
    }
  });
}

// All axes but the last are rows.
inline Index rows_in(const std::vector<Index>& sizes) {
  Index rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); i++) rows *= sizes[i];
  return rows;
}

struct Product : Kernel {  // of rows with a matrix, or its transpose; several are added up, and an odd input is a bias
  explicit Product(const Attributes& attributes) : turned(attributes.integers("turned", {})) {}
  void compute(const Call& call) const override {
    const size_t count = call.input_count() / 2;
    require(turned.size() == count && count > 0, "a product says of each matrix whether it is turned");
    std::vector<Term> terms;
    std::vector<Index> sizes;
    for (size_t i = 0; i < count; i++) {
      const auto a = call.input(2 * i), b = call.input(2 * i + 1);
      require(!a.sizes.empty() && b.sizes.size() == 2, "a product has rows and a matrix");
      const bool is_turned = turned[i] != 0;
      auto made = a.sizes;
      made.back() = b.sizes[!is_turned];
      require(a.sizes.back() == b.sizes[is_turned], "rows of a product are not as long as the matrix is high");
      require(i == 0 || made == sizes, "products that are added up have different sizes");
      sizes = made;
      if (a.sizes.back() > 0) terms.push_back({a.data, a.sizes.back(), {b.data, b.sizes[1], is_turned}});
    }
    const auto bias = call.input_count() % 2 ? call.input(2 * count) : Tensor<const float>{};
    require(!bias || bias.size() == sizes.back(), "the bias of a product has a number for each column");
    auto out = call.output(0, sizes);
    if (out.size() == 0) return;
    const Index rows = rows_in(sizes), columns = sizes.back();
    if (!terms.empty())
      multiply(call, terms, bias.data, rows, columns, out.data);
    else
      for (Index i = 0; i < rows * columns; i++) out.data[i] = bias ? bias.data[i % columns] : 0.f;
  }

 private:
  std::vector<Index> turned;
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
    else if (n.columns <= kNarrow)
      multiply_narrow(call, n.depth, {a.data, n.rows, false}, {b.data, n.columns, false}, out.data, n.columns, 1);
    else if (n.rows <= kNarrow)
      multiply_narrow(call, n.depth, {b.data, n.columns, false}, {a.data, n.rows, false}, out.data, 1, n.columns);
    else
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
