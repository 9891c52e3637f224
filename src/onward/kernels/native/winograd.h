// Convolutions by kernels of 3 x 3 with fewer multiplications, by Winograd: four outputs and the sixteen inputs that they
// read are a tile; both are taken to another basis, in which a convolution is sixteen products of matrices. That is
// 16 multiplications where there were 36. Numbers are as exact: all factors are 1 and 1/2.
#pragma once
#include "convolution.h"

namespace onward {
namespace ONWARD_ISA {

constexpr int kSide = 4, kPositions = kSide * kSide;

inline bool is_for_winograd(const Window& w, const Image& x, const Image& y) {
  constexpr Index kFew = 32;  // channels with which taking tiles to another basis costs more than it saves
  return w.kernel[0] == 3 && w.kernel[1] == 3 && w.strides[0] == 1 && w.strides[1] == 1 && w.dilations[0] == 1 &&
         w.dilations[1] == 1 && w.groups == 1 && x.channels % kLanes == 0 && y.channels % kLanes == 0 &&
         x.channels >= kFew && y.channels >= kFew && y.height > 1 && y.width > 1;
}

// Tiles of 2 x 2 outputs, and where they are.
struct Tiling {
  Index down, across, count;
  explicit Tiling(const Image& y) : down(ceiling(y.height, 2)), across(ceiling(y.width, 2)), count(y.count * down * across) {}
  Index image(Index tile) const { return tile / (down * across); }
  Index top(Index tile) const { return tile / across % down * 2; }
  Index left(Index tile) const { return tile % across * 2; }
};

// The rows of channels of size x size pixels, zeros where they are outside of the image.
template <int size>
void find_rows(const Image& image, const float* data, Index n, Index top, Index left, const float* zeros,
               const float* (&rows)[size * size]) {
  for (Index i = 0; i < size; i++)
    for (Index j = 0; j < size; j++) {
      const Index h = top + i, w = left + j;
      const bool inside = h >= 0 && h < image.height && w >= 0 && w < image.width;
      rows[i * size + j] = inside ? data + ((n * image.height + h) * image.width + w) * image.channels : zeros;
    }
}

// B' d B of a tile of inputs; to[position * stride].
inline void transform_inputs(const float* const* rows, Index channels, float* to, Index stride) {
  for (Index c = 0; c < channels; c += kLanes) {
    V d[kSide][kSide], t[kSide][kSide];
    for (int i = 0; i < kSide; i++)
      for (int j = 0; j < kSide; j++) d[i][j] = load(rows[i * kSide + j] + c);
    for (int j = 0; j < kSide; j++) {
      t[0][j] = d[0][j] - d[2][j];
      t[1][j] = d[1][j] + d[2][j];
      t[2][j] = d[2][j] - d[1][j];
      t[3][j] = d[1][j] - d[3][j];
    }
    for (int i = 0; i < kSide; i++) {
      float* at = to + i * kSide * stride + c;
      store(at, t[i][0] - t[i][2]);
      store(at + stride, t[i][1] + t[i][2]);
      store(at + 2 * stride, t[i][2] - t[i][1]);
      store(at + 3 * stride, t[i][1] - t[i][3]);
    }
  }
}

// A' m A: the four outputs of a tile.
inline void transform_outputs(const float* from, Index stride, Index channels, const float* bias, float* const* rows) {
  for (Index c = 0; c < channels; c += kLanes) {
    V t[2][kSide];
    for (int j = 0; j < kSide; j++) {
      const V a = load(from + j * stride + c), b = load(from + (kSide + j) * stride + c);
      const V d = load(from + (2 * kSide + j) * stride + c), e = load(from + (3 * kSide + j) * stride + c);
      t[0][j] = a + b + d;
      t[1][j] = b - d - e;
    }
    const V add = bias == nullptr ? V{} : load(bias + c);
    for (int i = 0; i < 2; i++) {
      if (rows[2 * i] != nullptr) store(rows[2 * i] + c, t[i][0] + t[i][1] + t[i][2] + add);
      if (rows[2 * i + 1] != nullptr) store(rows[2 * i + 1] + c, t[i][1] - t[i][2] - t[i][3] + add);
    }
  }
}

// G g G' of kernels, which are [9, width]; to[position * stride].
inline void transform_kernels(const float* from, Index width, float* to, Index stride) {
  for (Index c = 0; c < width; c += kLanes) {
    V t[kSide][3];
    for (int j = 0; j < 3; j++) {
      const V a = load(from + j * width + c), b = load(from + (3 + j) * width + c), d = load(from + (6 + j) * width + c);
      t[0][j] = a, t[1][j] = 0.5f * (a + b + d), t[2][j] = 0.5f * (a - b + d), t[3][j] = d;
    }
    for (int i = 0; i < kSide; i++) {
      float* at = to + i * kSide * stride + c;
      store(at, t[i][0]);
      store(at + stride, 0.5f * (t[i][0] + t[i][1] + t[i][2]));
      store(at + 2 * stride, 0.5f * (t[i][0] - t[i][1] + t[i][2]));
      store(at + 3 * stride, t[i][2]);
    }
  }
}

// `at(k, column, tap)` is the weight by which channel k of the inputs counts for channel `column` of the outputs.
template <class At>
void convolve_tiles(const Call& call, const Image& x, const Image& y, Index top, Index left, const float* image,
                    const float* bias, float* out, const At& at) {
  const Index inputs = x.channels, outputs = y.channels;
  const auto tiles = tiles_of(outputs);
  float* kernels = scratch(0, kPositions * inputs * outputs + inputs);
  float* zeros = kernels + kPositions * inputs * outputs;
  std::fill(zeros, zeros + inputs, 0.f);
  call.parallel(static_cast<Index>(tiles.size()), [&](Index i) {
    const Tile& tile = tiles[static_cast<size_t>(i)];
    float own[9 * kMostVectors * kLanes];
    for (Index k = 0; k < inputs; k++) {
      for (Index column = 0; column < tile.width(); column++)
        for (int tap = 0; tap < 9; tap++) own[tap * tile.width() + column] = at(k, tile.first + column, tap);
      transform_kernels(own, tile.width(), kernels + tile.first * inputs + k * tile.width(), inputs * outputs);
    }
  });
  const Tiling tiling(y);
  // As many tiles at once as stay cached with what becomes of them.
  constexpr Index kCached = 3 << 16, kAtLeast = 48, kMost = 96;
  const Index at_once = std::clamp<Index>(kCached / (kPositions * (inputs + outputs)) / kAtLeast * kAtLeast, kAtLeast, kMost);
  const Index blocks = ceiling(tiling.count, at_once);
  call.parallel(blocks, [&](Index block) {
    const Index first = tiling.count * block / blocks, last = tiling.count * (block + 1) / blocks, count = last - first;
    float* changed = scratch(1, kPositions * count * (inputs + outputs));
    float* products = changed + kPositions * count * inputs;
    for (Index t = 0; t < count; t++) {
      const float* rows[kPositions];
      find_rows<kSide>(x, image, tiling.image(first + t), tiling.top(first + t) - top, tiling.left(first + t) - left, zeros, rows);
      transform_inputs(rows, inputs, changed + t * inputs, count * inputs);
    }
    for (Index p = 0; p < kPositions; p++)
      for (const Tile& tile : tiles) {
        const Index step = rows_of(tile.vectors);
        for (Index t = 0; t < count; t += step) {
          Run run{{}, kernels + p * inputs * outputs + tile.first * inputs};
          float* to[kMostRows];
          for (Index m = 0; m < step; m++) {
            const Index row = p * count + std::min(t + m, count - 1);
            run.rows[m] = changed + row * inputs, to[m] = products + row * outputs + tile.first;
          }
          multiply_rows_of(tile.vectors)(&run, 1, inputs, to, std::min(step, count - t), tile.count, false, nullptr);
        }
      }
    for (Index t = 0; t < count; t++) {
      const Index n = tiling.image(first + t), h = tiling.top(first + t), w = tiling.left(first + t);
      float* rows[4];
      for (Index i = 0; i < 4; i++) {
        const bool inside = h + i / 2 < y.height && w + i % 2 < y.width;
        rows[i] = inside ? out + ((n * y.height + h + i / 2) * y.width + w + i % 2) * outputs : nullptr;
      }
      transform_outputs(products + t * outputs, count * outputs, outputs, bias, rows);
    }
  });
}

// ---- the gradient of the weights: a tile of inputs convolved with the four gradients of outputs gives 3 x 3 -----------

// G d G' of the gradients of a tile.
inline void transform_gradients(const float* const* rows, Index channels, float* to, Index stride) {
  for (Index c = 0; c < channels; c += kLanes) {
    V t[kSide][2];
    for (int j = 0; j < 2; j++) {
      const V a = load(rows[j] + c), b = load(rows[2 + j] + c);
      t[0][j] = a, t[1][j] = 0.5f * (a + b), t[2][j] = 0.5f * (a - b), t[3][j] = b;
    }
    for (int i = 0; i < kSide; i++) {
      float* at = to + i * kSide * stride + c;
      store(at, t[i][0]);
      store(at + stride, 0.5f * (t[i][0] + t[i][1]));
      store(at + 2 * stride, 0.5f * (t[i][0] - t[i][1]));
      store(at + 3 * stride, t[i][1]);
    }
  }
}

// A' s A: kernels of as many outputs as a vector has lanes, `step` apart.
inline void transform_sums(const float* from, Index stride, float* kernels, Index step) {
  V t[3][kSide], k[9];
  for (int j = 0; j < kSide; j++) {
    const V a = load(from + j * stride), b = load(from + (kSide + j) * stride);
    const V c = load(from + (2 * kSide + j) * stride), d = load(from + (3 * kSide + j) * stride);
    t[0][j] = a + b + c, t[1][j] = b - c, t[2][j] = b + c - d;
  }
  for (int i = 0; i < 3; i++) {
    k[3 * i] = t[i][0] + t[i][1] + t[i][2];
    k[3 * i + 1] = t[i][1] - t[i][2];
    k[3 * i + 2] = t[i][1] + t[i][2] - t[i][3];
  }
  for (int lane = 0; lane < kLanes; lane++)
    for (int tap = 0; tap < 9; tap++) kernels[lane * step + tap] = k[tap][lane];
}

// Tiles of inputs and of gradients in the other basis, [position, tile, channel], and the sums of their products.
class TileProducts {
 public:
  TileProducts(const Window& w, const Image& x, const Image& y, const float* image, const float* dy, const float* zeros)
      : w_(w), x_(x), y_(y), image_(image), dy_(dy), zeros_(zeros), tiling_(y), columns_(tiles_of(y.channels)) {}

  static Index size(const Image& x, const Image& y, Index count) { return kPositions * count * (x.channels + y.channels); }
  Index tiles() const { return tiling_.count; }
  Index columns() const { return static_cast<Index>(columns_.size()); }

  // `index` of `count` tiles, which begin with `first`.
  void transform(Index first, Index index, Index count, float* to) const {
    const Index tile = first + index, n = tiling_.image(tile), top = tiling_.top(tile), left = tiling_.left(tile);
    const float *rows[kPositions], *outer[4];
    find_rows<kSide>(x_, image_, n, top - w_.pads[0], left - w_.pads[1], zeros_, rows);
    transform_inputs(rows, x_.channels, to + index * x_.channels, count * x_.channels);
    find_rows<2>(y_, dy_, n, top, left, zeros_, outer);
    float* gradients = to + kPositions * count * x_.channels;
    transform_gradients(outer, y_.channels, gradients + index * y_.channels, count * y_.channels);
  }

  void add(Index position, Index column, Index first, Index last, Index count, const float* from, float* sums) const {
    const Tile& tile = columns_[static_cast<size_t>(column)];
    const Index inputs = x_.channels, outputs = y_.channels;
    const float* gradients = from + kPositions * count * inputs + position * count * outputs + tile.first;
    for (Index row = first; row < last;) {
      AddOuterProducts add;
      const Index rows = outer_step(tile.vectors, last - row, &add);
      const Segment all{from + position * count * inputs + row, gradients, count};
      add(&all, 1, inputs, outputs, sums + (position * inputs + row) * outputs + tile.first, outputs);
      row += rows;
    }
  }

 private:
  const Window& w_;
  const Image &x_, &y_;
  const float *image_, *dy_, *zeros_;
  Tiling tiling_;
  std::vector<Tile> columns_;
};

inline void weight_gradient_of_tiles(const Call& call, const Window& w, const Image& x, const Image& y,
                                     const float* image, const float* dy, float* dw) {
  const Index inputs = x.channels, outputs = y.channels, size = kPositions * inputs * outputs;
  constexpr Index kSmall = 1 << 18, kPieces = 8, kCached = 1 << 17, kLarge = 1 << 21, kPart = 32;
  // With few channels each of several pieces has sums of its own, and a few tiles at a time stay close to a core; else
  // all threads have the same tiles, and sums of their own.
  const Index pieces = size <= kSmall ? kPieces : 1;
  const Index room = (pieces > 1 ? kCached : kLarge) / (kPositions * (inputs + outputs));
  float* sums = scratch(0, pieces * size + std::max(inputs, outputs));
  float* zeros = sums + pieces * size;
  std::fill(sums, zeros + std::max(inputs, outputs), 0.f);
  const TileProducts products(w, x, y, image, dy, zeros);
  const Index tiles = products.tiles(), at_once = std::clamp<Index>(room, 32, std::max<Index>(tiles, 32));
  if (pieces > 1) {
    call.parallel(pieces, [&](Index piece) {
      float* own = scratch(1, TileProducts::size(x, y, at_once));
      const Index end = tiles * (piece + 1) / pieces;
      for (Index first = tiles * piece / pieces; first < end; first += at_once) {
        const Index count = std::min(at_once, end - first);
        for (Index i = 0; i < count; i++) products.transform(first, i, count, own);
        for (Index p = 0; p < kPositions; p++)
          for (Index column = 0; column < products.columns(); column++)
            products.add(p, column, 0, inputs, count, own, sums + piece * size);
      }
    });
  } else {
    float* changed = scratch(1, TileProducts::size(x, y, at_once));
    const Index parts = ceiling(inputs, 48);
    for (Index first = 0; first < tiles; first += at_once) {
      const Index count = std::min(at_once, tiles - first);
      call.parallel(ceiling(count, kPart), [&](Index part) {
        for (Index i = part * kPart; i < std::min((part + 1) * kPart, count); i++)
          products.transform(first, i, count, changed);
      });
      call.parallel(kPositions * products.columns() * parts, [&](Index task) {
        const Index part = task % parts, column = task / parts % products.columns(), p = task / parts / products.columns();
        products.add(p, column, inputs * part / parts, inputs * (part + 1) / parts, count, changed, sums);
      });
    }
  }
  call.parallel(outputs / kLanes, [&](Index i) {
    for (Index c = 0; c < inputs; c++) {
      float* one = sums + c * outputs + i * kLanes;
      for (Index p = 0; p < kPositions; p++, one += inputs * outputs) {
        V total = load(one);
        for (Index piece = 1; piece < pieces; piece++) total += load(one + piece * size);
        store(one, total);
      }
      transform_sums(sums + c * outputs + i * kLanes, inputs * outputs, dw + (i * kLanes * inputs + c) * 9, inputs * 9);
    }
  });
}

// ---- which way is taken ----------------------------------------------------------------------------------------------

inline void convolve_quickly(const Call& call, const Window& w, const Image& x, const Image& y, const float* image,
                             const float* weights, const float* bias, float* out) {
  if (!is_for_winograd(w, x, y)) return convolve(call, w, x, y, image, weights, bias, out);
  const Index inputs = x.channels;
  convolve_tiles(call, x, y, w.pads[0], w.pads[1], image, bias, out, [=](Index c, Index o, int tap) {
    return weights[(o * inputs + c) * 9 + tap];
  });
}

inline void image_gradient_quickly(const Call& call, const Window& w, const Image& x, const Image& y, const float* dy,
                                   const float* weights, const float* bias, float* dx) {
  if (!is_for_winograd(w, x, y)) return image_gradient(call, w, x, y, dy, weights, bias, dx);
  const Index inputs = x.channels;  // a convolution of the gradient with the kernels turned around
  convolve_tiles(call, y, x, 2 - w.pads[0], 2 - w.pads[1], dy, bias, dx, [=](Index o, Index c, int tap) {
    return weights[(o * inputs + c) * 9 + 8 - tap];
  });
}

inline void weight_gradient_quickly(const Call& call, const Window& w, const Image& x, const Image& y,
                                    const float* image, const float* dy, float* dw) {
  const bool mostly_inside = 16 * Tiling(y).count < 5 * y.pixels();  // of the outputs of tiles
  if (!is_for_winograd(w, x, y) || !mostly_inside) return weight_gradient(call, w, x, y, image, dy, dw);
  weight_gradient_of_tiles(call, w, x, y, image, dy, dw);
}

}  // namespace ONWARD_ISA
}  // namespace onward
