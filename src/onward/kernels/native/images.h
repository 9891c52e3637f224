// What moves pixels of channels-last images: putting channels last, MaxPool, and its gradient, which finds the largest again.
#pragma once
#include "convolution.h"

namespace onward {
namespace ONWARD_ISA {

// Calls function(image, line, column, number) for each pixel, on all threads.
template <class Function>
void each_pixel(const Call& call, const Image& image, const Function& function) {
  constexpr Index kFloatsOfTask = 1 << 14;
  if (image.pixels() == 0) return;
  split(call, image.pixels(), kFloatsOfTask / std::max<Index>(image.channels, 1), [&](Index first, Index last) {
    Index x = first % image.width, y = first / image.width % image.height, n = first / (image.width * image.height);
    for (Index pixel = first; pixel < last; pixel++) {
      function(n, y, x, pixel);
      if (++x == image.width) x = 0, ++y;
      if (y == image.height) y = 0, ++n;
    }
  });
}

// Calls function(row of the image) for each pixel of a window that is inside of it, in order.
template <class Function>
void each_tap(const Window& w, const Image& x, Index n, Index y_line, Index y_column, const Function& function) {
  for (Index i = 0; i < w.kernel[0]; i++) {
    const Index h = y_line * w.strides[0] - w.pads[0] + i * w.dilations[0];
    if (h < 0 || h >= x.height) continue;
    for (Index j = 0; j < w.kernel[1]; j++) {
      const Index v = y_column * w.strides[1] - w.pads[1] + j * w.dilations[1];
      if (v >= 0 && v < x.width) function(((n * x.height + h) * x.width + v) * x.channels);
    }
  }
}

struct ChannelsLast : Kernel {  // [N, C, H, W] -> [N, H, W, C]
  explicit ChannelsLast(const Attributes&) {}
  void compute(const Call& call) const override {
    const auto x = call.input(0);
    require(x.sizes.size() == 4, "an image has four axes");
    const Index count = x.sizes[0], channels = x.sizes[1], pixels = x.sizes[2] * x.sizes[3];
    auto y = call.output(0, {count, x.sizes[2], x.sizes[3], channels});
    constexpr Index kBlock = 64;  // pixels whose channels are cached together
    const Index blocks = ceiling(pixels, kBlock);
    split(call, count * blocks, std::max<Index>(1, 256 / std::max<Index>(channels, 1)), [&](Index first, Index last) {
      for (Index block = first; block < last; block++) {
        const Index n = block / blocks, begin = block % blocks * kBlock, end = std::min(begin + kBlock, pixels);
        for (Index c = 0; c < channels; c++) {
          const float* from = x.data + (n * channels + c) * pixels;
          float* to = y.data + n * channels * pixels + c;
          for (Index i = begin; i < end; i++) to[i * channels] = from[i];
        }
      }
    });
  }
};

inline VI is_larger(V a, V than) { return (a > than) | (a != a); }  // so that NaN stays

struct MaxPool : Kernel {
  explicit MaxPool(const Attributes& a) : window(a) {}
  void compute(const Call& call) const override {
    const auto x = call.input(0);
    const Image image(x.sizes);
    const Image y({image.count, window.outputs(0, image.height), window.outputs(1, image.width), image.channels});
    auto out = call.output(0, {y.count, y.height, y.width, y.channels});
    each_pixel(call, y, [&](Index n, Index line, Index v, Index pixel) {
      along(y.channels, [&](Index c, auto lanes) {
        V most = all(-INFINITY);
        each_tap(window, image, n, line, v, [&](Index at) {
          const V here = get(x.data + at + c, lanes);
          most = choose(is_larger(here, most), here, most);
        });
        put(out.data + pixel * y.channels + c, most, lanes);
      });
    });
  }
  Window window;
};

struct MaxPoolGradient : Kernel {  // dy, x
  explicit MaxPoolGradient(const Attributes& a) : window(a) {}
  void compute(const Call& call) const override {
    const auto dy = call.input(0), x = call.input(1);
    const Image image(x.sizes), y(dy.sizes);
    require(image.count == y.count && image.channels == y.channels && y.height == window.outputs(0, image.height) &&
                y.width == window.outputs(1, image.width),
            "a gradient of a pool does not fit its image");
    auto dx = call.output(0, x.sizes);
    call.parallel(image.count, [&](Index n) {  // windows of one image overlap
      const Index size = image.height * image.width * image.channels;
      std::fill(dx.data + n * size, dx.data + (n + 1) * size, 0.f);
      for (Index line = 0; line < y.height; line++)
        for (Index v = 0; v < y.width; v++)
          for (Index c = 0; c < image.channels; c += kLanes) {
            const Index lanes = std::min<Index>(kLanes, image.channels - c);
            const V given = get(dy.data + ((n * y.height + line) * y.width + v) * image.channels + c, lanes);
            V most = all(-INFINITY), where = V{};  // the first of the largest
            float tap = 0;
            each_tap(window, image, n, line, v, [&](Index at) {
              const V here = get(x.data + at + c, lanes);
              const VI larger = is_larger(here, most);
              most = choose(larger, here, most);
              where = choose(larger, all(tap), where);
              tap++;
            });
            tap = 0;
            each_tap(window, image, n, line, v, [&](Index at) {
              float* to = dx.data + at + c;
              put(to, get(to, lanes) + choose(where == all(tap), given, V{}), lanes);
              tap++;
            });
          }
    });
  }
  Window window;
};

}  // namespace ONWARD_ISA
}  // namespace onward
