// Images whose pixels are mixed of pixels of others, line by line and column by column: averages of windows, images in
// other sizes, and the gradients of both, which mix the other way round.
#pragma once
#include "images.h"

namespace onward {
namespace ONWARD_ISA {

struct Share {
  Index from;
  float part;
};

// What the lines, or the columns, of an image are mixed of.
struct Mixture {
  Index sources;
  std::vector<std::vector<Share>> targets;

  Mixture(Index sources, Index count) : sources(sources), targets(static_cast<size_t>(count)) {}
  Index count() const { return static_cast<Index>(targets.size()); }
  std::vector<Share>& of(Index target) { return targets[static_cast<size_t>(target)]; }
  const std::vector<Share>& of(Index target) const { return targets[static_cast<size_t>(target)]; }
};

// To whom each source has given a share.
inline Mixture turned_around(const Mixture& mixture) {
  Mixture other(mixture.count(), mixture.sources);
  for (Index target = 0; target < mixture.count(); target++)
    for (const Share& share : mixture.of(target)) other.of(share.from).push_back({target, share.part});
  return other;
}

inline void mix(const Call& call, const Mixture& lines, const Mixture& columns, Index count, Index channels,
                const float* from, float* to) {
  each_pixel(call, Image({count, lines.count(), columns.count(), channels}), [&](Index n, Index y, Index x, Index pixel) {
    const float* image = from + n * lines.sources * columns.sources * channels;
    along(channels, [&](Index c, auto lanes) {
      V sum{};
      for (const Share& line : lines.of(y))
        for (const Share& column : columns.of(x))
          sum += get(image + (line.from * columns.sources + column.from) * channels + c, lanes) * (line.part * column.part);
      put(to + pixel * channels + c, sum, lanes);
    });
  });
}

// An image from one mixture of lines and one of columns.
inline void mix_image(const Call& call, const Tensor<const float>& x, const Mixture& lines, const Mixture& columns) {
  const Image image(x.sizes);
  auto y = call.output(0, {image.count, lines.count(), columns.count(), image.channels});
  mix(call, lines, columns, image.count, image.channels, x.data, y.data);
}

// The gradient of that.
inline void mix_gradient(const Call& call, const Tensor<const float>& dy, const Image& x, const Mixture& lines,
                         const Mixture& columns) {
  const Image y(dy.sizes);
  require(x.count == y.count && x.channels == y.channels && y.height == lines.count() && y.width == columns.count(),
          "a gradient of a mixture does not fit its image");
  auto dx = call.output(0, {x.count, x.height, x.width, x.channels});
  mix(call, turned_around(lines), turned_around(columns), x.count, x.channels, dy.data, dx.data);
}

inline Image image_of(const Tensor<const Index>& sizes) {
  return Image(std::vector<Index>(sizes.data, sizes.data + sizes.size()));
}

// ---- averages --------------------------------------------------------------------------------------------------------

class Averages {
 public:
  explicit Averages(const Attributes& a) : window_(a), counts_pads_(a.integer("count_include_pad", 0) != 0) {}

  Mixture along(int axis, Index size) const {
    Mixture mixture(size, window_.outputs(axis, size));
    for (Index target = 0; target < mixture.count(); target++) {
      auto& shares = mixture.of(target);
      for (Index tap = 0; tap < window_.kernel[axis]; tap++) {
        const Index at = target * window_.strides[axis] - window_.pads[axis] + tap * window_.dilations[axis];
        if (at >= 0 && at < size) shares.push_back({at, 0.f});
      }
      const Index count = counts_pads_ ? window_.kernel[axis] : static_cast<Index>(shares.size());
      for (Share& share : shares) share.part = 1.f / static_cast<float>(count);
    }
    return mixture;
  }

 private:
  Window window_;
  bool counts_pads_;
};

struct AveragePool : Kernel {
  explicit AveragePool(const Attributes& a) : averages(a) {}
  void compute(const Call& call) const override {
    const auto x = call.input(0);
    const Image image(x.sizes);
    mix_image(call, x, averages.along(0, image.height), averages.along(1, image.width));
  }
  Averages averages;
};

struct AveragePoolGradient : Kernel {  // dy, the sizes of x
  explicit AveragePoolGradient(const Attributes& a) : averages(a) {}
  void compute(const Call& call) const override {
    const Image x = image_of(call.indices(1));
    mix_gradient(call, call.input(0), x, averages.along(0, x.height), averages.along(1, x.width));
  }
  Averages averages;
};

// ---- other sizes: tables say what lines and columns are mixed of, [targets, shares] ----------------------------------

inline Mixture table(const Call& call, size_t input, Index sources) {
  const auto places = call.indices(input);
  const auto parts = call.input(input + 1);
  require(places.sizes.size() == 2 && parts.sizes == places.sizes, "a table of a mixture does not fit");
  Mixture mixture(sources, places.sizes[0]);
  for (Index i = 0; i < places.size(); i++) {
    require(places.data[i] >= 0 && places.data[i] < sources, "a table of a mixture does not fit its image");
    mixture.of(i / places.sizes[1]).push_back({places.data[i], parts.data[i]});
  }
  return mixture;
}

struct Resize : Kernel {  // x, lines, their parts, columns, their parts
  explicit Resize(const Attributes&) {}
  void compute(const Call& call) const override {
    const auto x = call.input(0);
    const Image image(x.sizes);
    mix_image(call, x, table(call, 1, image.height), table(call, 3, image.width));
  }
};

struct ResizeGradient : Kernel {  // dy, lines, their parts, columns, their parts, the sizes of x
  explicit ResizeGradient(const Attributes&) {}
  void compute(const Call& call) const override {
    const Image x = image_of(call.indices(5));
    mix_gradient(call, call.input(0), x, table(call, 1, x.height), table(call, 3, x.width));
  }
};

}  // namespace ONWARD_ISA
}  // namespace onward
