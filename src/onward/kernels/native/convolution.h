// Convolutions of channels-last images, and their gradients. Weights are as ONNX has them: [O, C / groups, height, width].
#pragma once
#include "products.h"

namespace onward {
namespace ONWARD_ISA {

struct Window {
  Index kernel[2], strides[2], dilations[2], pads[4], groups;

  explicit Window(const Attributes& a) {
    const auto k = a.integers("kernel_shape", {1, 1}), s = a.integers("strides", {1, 1});
    const auto d = a.integers("dilations", {1, 1}), p = a.integers("pads", {0, 0, 0, 0});
    groups = a.integer("group", 1);
    require(k.size() == 2 && s.size() == 2 && d.size() == 2 && p.size() == 4, "a convolution has two axes");
    for (int i = 0; i < 2; i++) kernel[i] = k[i], strides[i] = s[i], dilations[i] = d[i];
    std::copy(p.begin(), p.end(), pads);
    for (int i = 0; i < 2; i++)
      require(kernel[i] > 0 && strides[i] > 0 && dilations[i] > 0 && groups > 0, "sizes of a window are positive");
  }

  Index taps() const { return kernel[0] * kernel[1]; }
  Index covered(int axis) const { return dilations[axis] * (kernel[axis] - 1) + 1; }
  Index outputs(int axis, Index size) const {
    const Index room = size + pads[axis] + pads[axis + 2] - covered(axis);
    require(room >= 0 || size == 0, "a window is larger than the image");  // runtimes disagree on its result
    return room < 0 ? 0 : room / strides[axis] + 1;
  }
};

struct Image {
  Index count, height, width, channels;

  explicit Image(const std::vector<Index>& sizes) {
    require(sizes.size() == 4, "an image has four axes");
    count = sizes[0], height = sizes[1], width = sizes[2], channels = sizes[3];
  }
  Index pixels() const { return count * height * width; }
};

// ---- forward, and the gradient of the image --------------------------------------------------------------------------

// For each pixel of a grid, rows of a source image at fixed offsets from it, times weights, give a row of a target.
struct Gathering {
  const float* source;
  Index source_height, source_width, source_channels;
  Index step[2];  // from a pixel of the grid to the next, in the source
  std::vector<std::pair<Index, Index>> offsets;  // of the taps
  Index across;  // taps that are read at once, each following the one before; without leaving the image
  float* target;
  Index target_height, target_width, target_channels;
  Index target_step[2], target_first[2];
  Index count, height, width;  // of the grid
  Index groups, length;  // floats in a tap
  Index columns;  // of a group
  const float* bias;

  Index pixels() const { return count * height * width; }
  Index runs() const { return static_cast<Index>(offsets.size()) / across; }
};

class Gatherer {
 public:
  Gatherer(const Gathering& g, const Packed& packed, const float* zeros) : g_(g), packed_(packed), zeros_(zeros) {}

  // All columns of some pixels, group by group, with weights of a few taps at a time, which stay cached.
  void run(Index first, Index last) const {
    for (Index group = 0; group < g_.groups; group++)
      for (size_t i = 0; i < packed_.tiles.size(); i++) {
        const Tile& tile = packed_.tiles[i];
        const Index numbers = tile.width() * g_.across * g_.length;
        const Index at_once = std::max<Index>(1, std::min<Index>(kCached / std::max<Index>(numbers, 1), kMostRuns));
        const float* weights =
            packed_.data + group * Packed::size(g_.columns, packed_.taps, packed_.length) + packed_.offset(i);
        for (Index run = 0; run < g_.runs(); run += at_once)
          for (Index pixel = first; pixel < last; pixel += rows_of(tile.vectors))
            pixels(group, tile, weights + run * numbers, run, std::min(at_once, g_.runs() - run), pixel, last);
      }
  }

 private:
  static constexpr Index kCached = 1 << 16;  // floats
  static constexpr Index kMostRuns = 32;

  void pixels(Index group, const Tile& tile, const float* weights, Index begin, Index count, Index first,
              Index last) const {
    const int rows = rows_of(tile.vectors);
    const Index length = g_.across * g_.length;
    Run runs[kMostRuns];
    bool is_read[kMostRuns] = {};
    float* to[kMostRows];
    Index x = first % g_.width, y = first / g_.width % g_.height, n = first / (g_.width * g_.height);
    for (int m = 0; m < rows; m++) {
      const float* image = g_.source + n * g_.source_height * g_.source_width * g_.source_channels + group * g_.length;
      for (Index i = 0; i < count; i++) {
        const auto& offset = g_.offsets[static_cast<size_t>((begin + i) * g_.across)];
        const Index h = y * g_.step[0] + offset.first, w = x * g_.step[1] + offset.second;
        const bool inside = h >= 0 && h < g_.source_height && w >= 0 && w < g_.source_width;
        runs[i].rows[m] = inside ? image + (h * g_.source_width + w) * g_.source_channels : zeros_;
        is_read[i] |= inside;
      }
      const Index row = (n * g_.target_height + y * g_.target_step[0] + g_.target_first[0]) * g_.target_width;
      to[m] = g_.target + (row + x * g_.target_step[1] + g_.target_first[1]) * g_.target_channels +
              group * g_.columns + tile.first;
      if (first + m + 1 >= last) continue;  // the last one again, for nothing
      if (++x == g_.width) x = 0, ++y;
      if (y == g_.height) y = 0, ++n;
    }
    Index found = 0;
    for (Index i = 0; i < count; i++) {
      if (!is_read[i]) continue;
      if (found < i) runs[found] = runs[i];
      runs[found++].weights = weights + i * tile.width() * length;
    }
    const float* bias = g_.bias == nullptr ? nullptr : g_.bias + group * g_.columns + tile.first;
    multiply_rows_of(tile.vectors)(runs, found, length, to, std::min<Index>(rows, last - first), tile.count, begin > 0,
                                   bias);
  }

  const Gathering& g_;
  const Packed& packed_;
  const float* zeros_;
};

constexpr Index kPixelsOfTask = 96;

// `at(group, tap, k, column)` is a weight.
template <class At>
void gather_each(const Call& call, const Gathering& g, const At& at) {
  const Index taps = static_cast<Index>(g.offsets.size()), size = Packed::size(g.columns, taps, g.length);
  const Index row = g.across * g.length;
  Packed packed{tiles_of(g.columns), taps, g.length, scratch(0, size * g.groups + row)};
  float* zeros = packed.data + size * g.groups;
  std::fill(zeros, zeros + row, 0.f);
  const Index tiles = static_cast<Index>(packed.tiles.size());
  call.parallel(tiles * g.groups, [&](Index i) {
    const Index group = i / tiles;
    Packed own = packed;
    own.data += group * size;
    pack(own, static_cast<size_t>(i % tiles),
         [&](Index tap, Index k, Index column) { return at(group, tap, k, column); });
  });
  const Gatherer gatherer(g, packed, zeros);
  split(call, g.pixels(), kPixelsOfTask, [&](Index first, Index last) { gatherer.run(first, last); });
}

// How many pixels of a line fit into a vector, where they are few columns each: they read nearly the same taps.
inline Index pixels_together(const Gathering& g) {
  if (g.groups > 1 || g.columns != g.target_channels || g.target_step[1] > 1) return 1;
  Index count = kLanes / g.columns;
  while (count > 1 && g.width % count != 0) count--;
  return std::max<Index>(count, 1);
}

template <class At>
void gather_products(const Call& call, const Gathering& g, const At& at) {
  if (g.pixels() == 0 || g.columns == 0) return;
  const Index together = pixels_together(g);
  if (together == 1) return gather_each(call, g, at);
  Gathering wide = g;
  wide.offsets.clear();
  for (const auto& [down, right] : g.offsets)
    for (Index i = 0; i < together; i++) wide.offsets.emplace_back(down, right + i * g.step[1]);
  std::sort(wide.offsets.begin(), wide.offsets.end());
  wide.offsets.erase(std::unique(wide.offsets.begin(), wide.offsets.end()), wide.offsets.end());
  if (4 * wide.offsets.size() > 3 * g.offsets.size() * static_cast<size_t>(together)) return gather_each(call, g, at);
  if (g.across > 1) wide.across = static_cast<Index>(wide.offsets.size()) / g.runs();
  wide.step[1] *= together, wide.target_step[1] *= together, wide.width /= together, wide.columns *= together;
  std::vector<float> bias;
  for (Index i = 0; g.bias != nullptr && i < together; i++) bias.insert(bias.end(), g.bias, g.bias + g.columns);
  if (g.bias != nullptr) wide.bias = bias.data();
  gather_each(call, wide, [&](Index group, Index tap, Index k, Index column) {
    auto offset = wide.offsets[static_cast<size_t>(tap)];
    offset.second -= column / g.columns * g.step[1];
    const auto found = std::find(g.offsets.begin(), g.offsets.end(), offset);
    return found == g.offsets.end() ? 0.f : at(group, found - g.offsets.begin(), k, column % g.columns);
  });
}

// Images with few channels have short rows: with a border of zeros, the taps of a row of the kernel are one long row.
inline bool has_short_rows(const Window& w, Index channels) {
  return channels < 16 && w.groups == 1 && w.kernel[1] > 1 && w.dilations[1] == 1;
}

inline Image with_border(const Window& w, const Image& x) {
  return Image({x.count, x.height + w.pads[0] + w.pads[2], x.width + w.pads[1] + w.pads[3], x.channels});
}

inline const float* add_border(const Call& call, const Window& w, const Image& x, const float* data) {
  const Image wide = with_border(w, x);
  const Index row = wide.width * wide.channels;
  float* to = scratch(1, wide.pixels() * wide.channels);
  split(call, wide.count * wide.height, 64, [&](Index first, Index last) {
    for (Index r = first; r < last; r++) {
      float* line = to + r * row;
      std::fill(line, line + row, 0.f);
      const Index y = r % wide.height - w.pads[0], n = r / wide.height;
      if (y < 0 || y >= x.height) continue;
      const float* from = data + (n * x.height + y) * x.width * x.channels;
      std::copy(from, from + x.width * x.channels, line + w.pads[1] * x.channels);
    }
  });
  return to;
}

// What is left where nothing is added up.
inline void fill_pixels(float* to, Index count, Index channels, const float* bias) {
  if (bias == nullptr) return std::fill(to, to + count * channels, 0.f);
  for (Index i = 0; i < count; i++) std::copy(bias, bias + channels, to + i * channels);
}

inline Window without_pads(Window w) {
  std::fill(w.pads, w.pads + 4, 0);
  return w;
}

void convolve_by_channel(const Call&, const Window&, const Image&, const Image&, const float*, const float*,
                         const float*, float*);
void image_gradient_by_channel(const Call&, const Window&, const Image&, const Image&, const float*, const float*,
                               const float*, float*);
void weight_gradient_by_channel(const Call&, const Window&, const Image&, const Image&, const float*, const float*,
                                float*);

inline bool is_by_channel(const Window& w, const Image& x, const Image& y) {
  return w.groups > 1 && w.groups == x.channels && w.groups == y.channels;
}

inline void convolve(const Call& call, Window w, Image x, const Image& y, const float* image, const float* weights,
                     const float* bias, float* out) {
  if (is_by_channel(w, x, y)) return convolve_by_channel(call, w, x, y, image, weights, bias, out);
  const Index taps = w.taps(), inputs = x.channels / w.groups, outputs = y.channels / w.groups;
  Gathering g{};
  g.length = inputs, g.across = 1;
  if (has_short_rows(w, x.channels)) {
    image = add_border(call, w, x, image);
    x = with_border(w, x);
    w = without_pads(w);
    g.across = w.kernel[1];
  }
  for (Index h = 0; h < w.kernel[0]; h++)
    for (Index v = 0; v < w.kernel[1]; v++)
      g.offsets.emplace_back(h * w.dilations[0] - w.pads[0], v * w.dilations[1] - w.pads[1]);
  g.source = image, g.source_height = x.height, g.source_width = x.width, g.source_channels = x.channels;
  g.step[0] = w.strides[0], g.step[1] = w.strides[1];
  g.target = out, g.target_height = y.height, g.target_width = y.width, g.target_channels = y.channels;
  g.target_step[0] = g.target_step[1] = 1;
  g.count = y.count, g.height = y.height, g.width = y.width;
  g.groups = w.groups, g.columns = outputs, g.bias = bias;
  gather_products(call, g, [=](Index group, Index tap, Index c, Index o) {
    return weights[((group * outputs + o) * inputs + c) * taps + tap];
  });
}

// Also a transposed convolution, which may have a bias.
inline void image_gradient(const Call& call, const Window& w, const Image& x, const Image& y, const float* dy,
                           const float* weights, const float* bias, float* dx) {
  if (is_by_channel(w, x, y)) return image_gradient_by_channel(call, w, x, y, dy, weights, bias, dx);
  const Index taps = w.taps(), inputs = x.channels / w.groups, outputs = y.channels / w.groups;
  // With strides, pixels of the image fall into kinds, each of which is reached by some of the taps.
  for (Index kind_h = 0; kind_h < std::min(w.strides[0], x.height); kind_h++)
    for (Index kind_w = 0; kind_w < std::min(w.strides[1], x.width); kind_w++) {
      Gathering g{};
      std::vector<Index> reached;
      for (Index h = 0; h < w.kernel[0]; h++)
        for (Index v = 0; v < w.kernel[1]; v++) {
          const Index down = kind_h + w.pads[0] - h * w.dilations[0], right = kind_w + w.pads[1] - v * w.dilations[1];
          if (down % w.strides[0] != 0 || right % w.strides[1] != 0) continue;
          g.offsets.emplace_back(down / w.strides[0], right / w.strides[1]);
          reached.push_back(h * w.kernel[1] + v);
        }
      g.source = dy, g.source_height = y.height, g.source_width = y.width, g.source_channels = y.channels;
      g.step[0] = g.step[1] = 1;
      g.target = dx, g.target_height = x.height, g.target_width = x.width, g.target_channels = x.channels;
      g.target_step[0] = w.strides[0], g.target_step[1] = w.strides[1];
      g.target_first[0] = kind_h, g.target_first[1] = kind_w;
      g.count = x.count;
      g.height = ceiling(x.height - kind_h, w.strides[0]), g.width = ceiling(x.width - kind_w, w.strides[1]);
      g.groups = w.groups, g.length = outputs, g.across = 1, g.columns = inputs, g.bias = bias;
      if (reached.empty()) {  // no output has seen them
        for (Index i = 0; i < g.pixels(); i++) {
          const Index row = i / g.width, n = row / g.height, h = row % g.height * w.strides[0] + kind_h;
          const Index v = i % g.width * w.strides[1] + kind_w;
          fill_pixels(dx + ((n * x.height + h) * x.width + v) * x.channels, 1, x.channels, bias);
        }
        continue;
      }
      gather_products(call, g, [=, &reached](Index group, Index tap, Index o, Index c) {
        return weights[((group * outputs + o) * inputs + c) * taps + reached[static_cast<size_t>(tap)]];
      });
    }
}

// ---- the gradient of the weights -------------------------------------------------------------------------------------

class WeightGradient {
 public:
  // Sums are [taps, rows, columns filled up], for a group; a row of x may be several taps.
  WeightGradient(const Window& w, const Image& x, const Image& y, const float* image, const float* dy, Index rows,
                 Index taps_across)
      : w_(w), x_(x), y_(y), image_(image), dy_(dy), rows_(rows), across_(taps_across) {}

  Index taps() const { return w_.kernel[0] * across_; }

  Index lines() const { return y_.count * y_.height; }

  // Adds to all taps of some rows of a tile of columns what some lines give. Pixels come in pieces that stay cached.
  void run(Index group, const Tile& tile, Index first, Index last, Index begin, Index end, float* to) const {
    const Index outputs = y_.channels / w_.groups, stride = tile.width();
    const Index at_once = std::max<Index>(1, kPixels / std::max<Index>(y_.width, 1));
    std::vector<Segment> segments(static_cast<size_t>(std::min(at_once, end - begin)));
    const Index step = w_.strides[1] * x_.channels;
    for (Index line = begin; line < end; line += at_once) {
      const Index count = std::min(at_once, end - line);
      const float* dy = dy_ + line * y_.width * y_.channels + group * outputs + tile.first;
      Index width = y_.channels;
      if (tile.count < tile.width() && line + count == lines()) {  // elsewhere there is more to be read, and not used
        dy = filled_up(dy, tile, count * y_.width);
        width = tile.width();
      }
      for (Index row = first; row < last;) {
        AddOuterProducts add;
        const Index rows = outer_step(tile.vectors, last - row, &add);
        for (Index tap = 0; tap < taps(); tap++) {
          const Index found = find(group, tap, line, count, row, dy, width, segments);
          add(segments.data(), found, step, width, to + (tap * rows_ + row) * stride, stride);
        }
        row += rows;
      }
    }
  }

 private:
  static constexpr Index kPixels = 1024;

  const float* filled_up(const float* dy, const Tile& tile, Index pixels) const {
    float* to = scratch(2, pixels * tile.width());
    for (Index i = 0; i < pixels; i++) {
      std::copy(dy + i * y_.channels, dy + i * y_.channels + tile.count, to + i * tile.width());
      std::fill(to + i * tile.width() + tile.count, to + (i + 1) * tile.width(), 0.f);
    }
    return to;
  }

  // The pixels of some lines that a tap reads inside of the image.
  Index find(Index group, Index tap, Index line, Index count, Index row, const float* dy, Index width,
             std::vector<Segment>& segments) const {
    const Index down = tap / across_ * w_.dilations[0] - w_.pads[0];
    const Index right = tap % across_ * w_.dilations[1] - w_.pads[1];
    const Index first = right >= 0 ? 0 : ceiling(-right, w_.strides[1]);
    const Index room = x_.width - 1 - right;
    const Index last = room < 0 ? 0 : std::min(room / w_.strides[1] + 1, y_.width);
    Index found = 0;
    if (first >= last) return 0;
    for (Index i = 0; i < count; i++) {
      const Index n = (line + i) / y_.height, h = (line + i) % y_.height * w_.strides[0] + down;
      if (h < 0 || h >= x_.height) continue;
      const Index pixel = (n * x_.height + h) * x_.width + first * w_.strides[1] + right;
      segments[static_cast<size_t>(found++)] = {image_ + pixel * x_.channels + group * (x_.channels / w_.groups) + row,
                                                dy + (i * y_.width + first) * width, last - first};
    }
    return found;
  }

  const Window& w_;
  const Image &x_, &y_;
  const float *image_, *dy_;
  Index rows_, across_;
};

inline void weight_gradient(const Call& call, Window w, Image x, const Image& y, const float* image, const float* dy,
                            float* dw) {
  if (is_by_channel(w, x, y)) return weight_gradient_by_channel(call, w, x, y, image, dy, dw);
  const Index taps = w.taps(), inputs = x.channels / w.groups, outputs = y.channels / w.groups;
  const bool is_short = has_short_rows(w, x.channels);
  if (is_short) {
    image = add_border(call, w, x, image);
    x = with_border(w, x);
    w = without_pads(w);
  }
  const Index rows = is_short ? inputs * w.kernel[1] : inputs;
  const WeightGradient gradient(w, x, y, image, dy, rows, is_short ? 1 : w.kernel[1]);
  const auto tiles = tiles_of(outputs);
  const Index count = static_cast<Index>(tiles.size()), size = taps * inputs * ceiling(outputs, kLanes) * kLanes;
  // Tasks have tiles and rows of their own; where these are few, also lines, whose sums are added up at the end. None of
  // it depends on how many threads there are, and so neither do the results.
  constexpr Index kTasks = 8, kLeastPixels = 2048, kRows = 48;
  const Index parts = ceiling(rows, kRows);
  const Index pieces = std::clamp<Index>(ceiling(kTasks, w.groups * count * parts), 1, 1 + y.pixels() / kLeastPixels);
  float* sums = scratch(0, pieces * w.groups * size);
  call.parallel(w.groups * count * parts * pieces, [&](Index task) {
    const Index piece = task % pieces, part = task / pieces % parts, group = task / pieces / parts / count;
    const Tile& tile = tiles[static_cast<size_t>(task / pieces / parts % count)];
    const Index first = rows * part / parts, last = rows * (part + 1) / parts, lines = gradient.lines();
    float* to = sums + (piece * w.groups + group) * size + tile.first * taps * inputs;
    for (Index tap = 0; tap < gradient.taps(); tap++)
      std::fill(to + (tap * rows + first) * tile.width(), to + (tap * rows + last) * tile.width(), 0.f);
    gradient.run(group, tile, first, last, lines * piece / pieces, lines * (piece + 1) / pieces, to);
  });
  // From [taps, inputs, outputs] to the order of ONNX.
  call.parallel(w.groups * count, [&](Index task) {
    const Index group = task / count;
    const Tile& tile = tiles[static_cast<size_t>(task % count)];
    const float* from = sums + group * size + tile.first * taps * inputs;
    for (Index o = 0; o < tile.count; o++)
      for (Index c = 0; c < inputs; c++)
        for (Index tap = 0; tap < taps; tap++) {
          const float* one = from + (tap * inputs + c) * tile.width() + o;
          float total = 0;
          for (Index piece = 0; piece < pieces; piece++) total += one[piece * w.groups * size];
          dw[((group * outputs + tile.first + o) * inputs + c) * taps + tap] = total;
        }
  });
}

// ---- kernels ---------------------------------------------------------------------------------------------------------

// By whatever way is the fastest; in winograd.h, since those ways use what is here.
void convolve_quickly(const Call&, const Window&, const Image&, const Image&, const float*, const float*, const float*,
                      float*);
void image_gradient_quickly(const Call&, const Window&, const Image&, const Image&, const float*, const float*,
                            const float*, float*);
void weight_gradient_quickly(const Call&, const Window&, const Image&, const Image&, const float*, const float*, float*);

struct Conv : Kernel {
  explicit Conv(const Attributes& a) : window(a) {}
  void compute(const Call& call) const override {
    const auto x = call.input(0), w = call.input(1), b = call.input(2);
    const Image image(x.sizes);
    require(w.sizes.size() == 4 && w.sizes[2] == window.kernel[0] && w.sizes[3] == window.kernel[1] &&
                w.sizes[1] * window.groups == image.channels && w.sizes[0] % window.groups == 0,
            "weights of a convolution do not fit its image");
    require(!b || b.size() == w.sizes[0], "a convolution has a bias of each channel");
    const Image y({image.count, window.outputs(0, image.height), window.outputs(1, image.width), w.sizes[0]});
    auto out = call.output(0, {y.count, y.height, y.width, y.channels});
    if (out.size() > 0) convolve_quickly(call, window, image, y, x.data, w.data, b.data, out.data);
  }
  Window window;
};

inline void check_gradient(const Window& w, const Image& x, const Image& y) {
  require(x.count == y.count && y.height == w.outputs(0, x.height) && y.width == w.outputs(1, x.width) &&
              x.channels % w.groups == 0 && y.channels % w.groups == 0,
          "a gradient of a convolution does not fit its image");
}

struct ConvInputGradient : Kernel {  // dy, weights, the sizes of x
  explicit ConvInputGradient(const Attributes& a) : window(a) {}
  void compute(const Call& call) const override {
    const auto dy = call.input(0), w = call.input(1);
    const auto sizes = call.indices(2);
    const std::vector<Index> shape(sizes.data, sizes.data + sizes.size());
    const Image x(shape), y(dy.sizes);
    check_gradient(window, x, y);
    require(w.sizes.size() == 4 && w.sizes[0] == y.channels && w.sizes[1] * window.groups == x.channels &&
                w.sizes[2] == window.kernel[0] && w.sizes[3] == window.kernel[1],
            "weights of a convolution do not fit its gradient");
    auto dx = call.output(0, shape);
    if (dy.size() == 0)
      fill_pixels(dx.data, x.pixels(), x.channels, nullptr);
    else
      image_gradient_quickly(call, window, x, y, dy.data, w.data, nullptr, dx.data);
  }
  Window window;
};

struct ConvWeightGradient : Kernel {  // x, dy
  explicit ConvWeightGradient(const Attributes& a) : window(a) {}
  void compute(const Call& call) const override {
    const auto x = call.input(0), dy = call.input(1);
    const Image image(x.sizes), y(dy.sizes);
    check_gradient(window, image, y);
    auto dw = call.output(0, {y.channels, image.channels / window.groups, window.kernel[0], window.kernel[1]});
    if (dy.size() == 0)
      std::fill(dw.data, dw.data + dw.size(), 0.f);
    else
      weight_gradient_quickly(call, window, image, y, x.data, dy.data, dw.data);
  }
  Window window;
};

}  // namespace ONWARD_ISA
}  // namespace onward
