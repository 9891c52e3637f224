// Products of rows that lie anywhere in memory with packed weights: what convolutions are made of, without copying
// windows. Images are channels-last, so that the channels of a pixel are such a row.
#pragma once
#include "vectors.h"

namespace onward {
namespace ONWARD_ISA {

// Columns of a product are computed in tiles of a few vectors, for as many rows as registers hold sums for.
constexpr int kMostVectors = kLanes == 16 ? 4 : 2;
constexpr int rows_of(int vectors) { return kLanes == 16 && vectors == 4 ? 6 : kLanes < 16 && vectors == 2 ? 6 : 8; }
constexpr int kMostRows = 8;

struct Tile {
  Index first;  // column
  Index count;  // of columns
  int vectors;
  Index width() const { return static_cast<Index>(vectors) * kLanes; }
};

inline std::vector<Tile> tiles_of(Index columns) {
  const Index vectors = ceiling(columns, kLanes), parts = ceiling(vectors, kMostVectors);
  std::vector<Tile> tiles;
  Index first = 0;
  for (Index i = 0; i < parts; i++) {
    const Index count = vectors / parts + (i < vectors % parts);
    tiles.push_back({first, std::min(count * kLanes, columns - first), static_cast<int>(count)});
    first += count * kLanes;
  }
  return tiles;
}

// Weights by tile: for each tap and each of its numbers, a row as wide as the tile, filled up with zeros.
struct Packed {
  std::vector<Tile> tiles;
  Index taps, length;  // numbers in a tap
  float* data;

  Index width() const { return tiles.empty() ? 0 : tiles.back().first + tiles.back().width(); }
  Index offset(size_t tile) const { return tiles[tile].first * taps * length; }  // all before are full
  static Index size(Index columns, Index taps, Index length) {
    return ceiling(columns, kLanes) * kLanes * taps * length;
  }
};

// `at(tap, k, column)` is a weight.
template <class At>
void pack(const Packed& packed, size_t tile, const At& at) {
  const Tile& t = packed.tiles[tile];
  float* to = packed.data + packed.offset(tile);
  for (Index tap = 0; tap < packed.taps; tap++)
    for (Index k = 0; k < packed.length; k++, to += t.width()) {
      for (Index i = 0; i < t.count; i++) to[i] = at(tap, k, t.first + i);
      for (Index i = t.count; i < t.width(); i++) to[i] = 0;
    }
}

// Rows of numbers, and the weights that they are multiplied with.
struct Run {
  const float* rows[kMostRows];
  const float* weights;
};

// out[m][:] = (adds ? out[m][:] : bias) + sum over runs and k of rows[m][k] * weights[k][:]
template <int vectors>
void multiply_rows(const Run* runs, Index count, Index length, float* const* out, Index valid, Index columns, bool adds,
                   const float* bias) {
  constexpr int kRows = rows_of(vectors);
  const Index lanes = columns - (vectors - 1) * kLanes;  // of the last vector
  V sums[kRows][vectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; m++) {
    const float* from = adds ? out[m] : bias;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
      sums[m][v] = from == nullptr ? V{} : get(from + v * kLanes, v + 1 < vectors ? kLanes : lanes);
  }
  for (const Run* run = runs; run < runs + count; run++) {
    const float* row[kRows];
    for (int m = 0; m < kRows; m++) row[m] = run->rows[m];
    const float* weights = run->weights;
    for (Index k = 0; k < length; k++, weights += vectors * kLanes) {
      V w[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) w[v] = load(weights + v * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; m++) {
        const V x = all(row[m][k]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[m][v] += x * w[v];
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; m++) {
    if (m >= valid) break;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) put(out[m] + v * kLanes, sums[m][v], v + 1 < vectors ? kLanes : lanes);
  }
}

using MultiplyRows = void (*)(const Run*, Index, Index, float* const*, Index, Index, bool, const float*);

inline MultiplyRows multiply_rows_of(int vectors) {
  static constexpr MultiplyRows kAll[] = {multiply_rows<1>, multiply_rows<2>,
#if ONWARD_LANES == 16
                                          multiply_rows<3>, multiply_rows<4>
#endif
  };
  return kAll[vectors - 1];
}

// Pixels that are read along two lines: from x, `step` floats apart, and from y, one row of `width` after another.
struct Segment {
  const float* x;
  const float* y;
  Index count;
};

// sums[m][:] += sum over pixels of x[m] * y[:], sums being rows `stride` apart.
template <int rows, int vectors>
void add_outer_products(const Segment* segments, Index count, Index step, Index width, float* to, Index stride) {
  V sums[rows][vectors];
#pragma GCC unroll 16
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[m][v] = load(to + m * stride + v * kLanes);
  for (Index s = 0; s < count; s++) {
    const float *x = segments[s].x, *y = segments[s].y;
    for (Index i = segments[s].count; i > 0; i--, x += step, y += width) {
      V w[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) w[v] = load(y + v * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < rows; m++) {
        const V factor = all(x[m]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[m][v] += factor * w[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) store(to + m * stride + v * kLanes, sums[m][v]);
}

using AddOuterProducts = void (*)(const Segment*, Index, Index, Index, float*, Index);

constexpr int outer_rows(int vectors) {
  return kLanes == 16 ? (vectors == 4 ? 6 : vectors == 3 ? 8 : 12) : (vectors == 2 ? 6 : 8);
}

template <int vectors, int... rows>
AddOuterProducts outer_products_of(Index count, std::integer_sequence<int, rows...>) {
  static constexpr AddOuterProducts kAll[] = {add_outer_products<rows + 1, vectors>...};
  return kAll[count - 1];
}

template <int vectors>
AddOuterProducts outer_products_of(Index count) {
  return outer_products_of<vectors>(count, std::make_integer_sequence<int, outer_rows(vectors)>());
}

// For a tile with so many vectors: how many of the rows that are left are done next, in about equal steps, and by what.
inline Index outer_step(int vectors, Index left, AddOuterProducts* function) {
  const Index count = ceiling(left, ceiling(left, outer_rows(vectors)));
  switch (vectors) {
    case 1: *function = outer_products_of<1>(count); break;
#if ONWARD_LANES == 16
    case 3: *function = outer_products_of<3>(count); break;
    case 4: *function = outer_products_of<4>(count); break;
#endif
    default: *function = outer_products_of<2>(count);
  }
  return count;
}

// ---- small products, of rows that are a fixed step apart -------------------------------------------------------------

// Numbers at data[i * row + k * step].
struct Strided {
  const float* data;
  Index row, step;
};

// c[m][:] = (adds ? c[m][:] : 0) + sum over k of a[m][k] * b[k][:], rows of b and c being whole vectors.
template <int rows, int vectors>
void multiply_tile(Strided a, const float* b, Index b_row, float* c, Index c_row, Index depth, bool adds) {
  V sums[rows][vectors];
#pragma GCC unroll 16
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[m][v] = adds ? load(c + m * c_row + v * kLanes) : V{};
  for (Index k = 0; k < depth; k++, b += b_row) {
    V w[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) w[v] = load(b + v * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
      const V x = all(a.data[m * a.row + k * a.step]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sums[m][v] += x * w[v];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) store(c + m * c_row + v * kLanes, sums[m][v]);
}

template <int vectors>
void multiply_columns(Strided a, Index rows, const float* b, Index b_row, float* c, Index c_row, Index depth,
                      bool adds) {
  constexpr int kFull = outer_rows(vectors);
  Index m = 0;
  const auto tile = [&](auto* function, int count) {
    function({a.data + m * a.row, a.row, a.step}, b, b_row, c + m * c_row, c_row, depth, adds);
    m += count;
  };
  while (rows - m >= kFull) tile(multiply_tile<kFull, vectors>, kFull);
  while (rows - m >= 4) tile(multiply_tile<4, vectors>, 4);
  if (rows - m >= 2) tile(multiply_tile<2, vectors>, 2);
  if (rows - m >= 1) tile(multiply_tile<1, vectors>, 1);
}

inline void multiply_columns(int vectors, Strided a, Index rows, const float* b, Index b_row, float* c, Index c_row,
                             Index depth, bool adds) {
  switch (vectors) {
    case 1: multiply_columns<1>(a, rows, b, b_row, c, c_row, depth, adds); break;
    case 2: multiply_columns<2>(a, rows, b, b_row, c, c_row, depth, adds); break;
#if ONWARD_LANES == 16
    case 3: multiply_columns<3>(a, rows, b, b_row, c, c_row, depth, adds); break;
    case 4: multiply_columns<4>(a, rows, b, b_row, c, c_row, depth, adds); break;
#endif
  }
}

// The same for all columns, in vectors.
inline void multiply(Strided a, Index rows, const float* b, Index b_row, float* c, Index c_row, Index columns,
                     Index depth, bool adds) {
  const Index vectors = ceiling(columns, kLanes), parts = ceiling(vectors, kMostVectors);
  for (Index part = 0; part < parts; part++) {
    const Index count = vectors / parts + (part < vectors % parts);
    multiply_columns(static_cast<int>(count), a, rows, b, b_row, c, c_row, depth, adds);
    b += count * kLanes;
    c += count * kLanes;
  }
}

// The same with packed weights of a single tap; rows of c are as wide as they.
inline void multiply(Strided a, Index rows, const Packed& b, float* c, bool adds) {
  for (size_t tile = 0; tile < b.tiles.size(); tile++) {
    const Tile& t = b.tiles[tile];
    multiply_columns(t.vectors, a, rows, b.data + b.offset(tile), t.width(), c + t.first, b.width(), b.length, adds);
  }
}

}  // namespace ONWARD_ISA
}  // namespace onward
