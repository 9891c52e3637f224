// Convolutions in which each channel has a kernel of its own: vectors run along channels.
#pragma once
#include "convolution.h"

namespace onward {
namespace ONWARD_ISA {

// Kernels as [taps, channels].
inline float* turned(const float* weights, Index channels, Index taps, int slot) {
  float* to = scratch(slot, channels * taps);
  for (Index c = 0; c < channels; c++)
    for (Index tap = 0; tap < taps; tap++) to[tap * channels + c] = weights[c * taps + tap];
  return to;
}

constexpr Index kMostTapsByChannel = 128;

// sum over taps of rows[tap][c] * weights[tap][c] for all channels
inline void sum_of_taps(const float* const* rows, const float* const* weights, Index taps, const float* bias,
                        Index channels, float* out) {
  Index c = 0;
  for (; c + 2 * kLanes <= channels; c += 2 * kLanes) {
    V a = bias ? load(bias + c) : V{}, b = bias ? load(bias + c + kLanes) : V{};
    for (Index t = 0; t < taps; t++) {
      a += load(rows[t] + c) * load(weights[t] + c);
      b += load(rows[t] + c + kLanes) * load(weights[t] + c + kLanes);
    }
    store(out + c, a);
    store(out + c + kLanes, b);
  }
  for (; c < channels; c += kLanes) {
    const Index left = std::min<Index>(channels - c, kLanes);
    V a = bias ? load_some(bias + c, left) : V{};
    for (Index t = 0; t < taps; t++) a += load_some(rows[t] + c, left) * load_some(weights[t] + c, left);
    store_some(out + c, a, left);
  }
}

inline void convolve_by_channel(const Call& call, const Window& w, const Image& x, const Image& y, const float* image,
                                const float* weights, const float* bias, float* out) {
  const Index channels = x.channels, taps = w.taps();
  require(taps <= kMostTapsByChannel, "the kernel of a convolution by channel is too large");
  const float* kernels = turned(weights, channels, taps, 0);
  split(call, y.count * y.height, 4, [&](Index first, Index last) {
    const float *rows[kMostTapsByChannel], *factors[kMostTapsByChannel];
    for (Index line = first; line < last; line++)
      for (Index v = 0; v < y.width; v++) {
        const Index n = line / y.height, top = line % y.height * w.strides[0] - w.pads[0];
        const Index left = v * w.strides[1] - w.pads[1];
        Index found = 0;
        for (Index i = 0; i < w.kernel[0]; i++)
          for (Index j = 0; j < w.kernel[1]; j++) {
            const Index h = top + i * w.dilations[0], u = left + j * w.dilations[1];
            if (h < 0 || h >= x.height || u < 0 || u >= x.width) continue;
            rows[found] = image + ((n * x.height + h) * x.width + u) * channels;
            factors[found++] = kernels + (i * w.kernel[1] + j) * channels;
          }
        sum_of_taps(rows, factors, found, bias, channels, out + (line * y.width + v) * channels);
      }
  });
}

inline void image_gradient_by_channel(const Call& call, const Window& w, const Image& x, const Image& y,
                                      const float* dy, const float* weights, float* dx) {
  const Index channels = x.channels, taps = w.taps();
  require(taps <= kMostTapsByChannel, "the kernel of a convolution by channel is too large");
  const float* kernels = turned(weights, channels, taps, 0);
  split(call, x.count * x.height, 4, [&](Index first, Index last) {
    const float *rows[kMostTapsByChannel], *factors[kMostTapsByChannel];
    for (Index line = first; line < last; line++)
      for (Index v = 0; v < x.width; v++) {
        const Index n = line / x.height, bottom = line % x.height + w.pads[0], right = v + w.pads[1];
        Index found = 0;
        for (Index i = 0; i < w.kernel[0]; i++)
          for (Index j = 0; j < w.kernel[1]; j++) {
            const Index h = bottom - i * w.dilations[0], u = right - j * w.dilations[1];
            if (h < 0 || u < 0 || h % w.strides[0] != 0 || u % w.strides[1] != 0) continue;
            if (h / w.strides[0] >= y.height || u / w.strides[1] >= y.width) continue;
            rows[found] = dy + ((n * y.height + h / w.strides[0]) * y.width + u / w.strides[1]) * channels;
            factors[found++] = kernels + (i * w.kernel[1] + j) * channels;
          }
        sum_of_taps(rows, factors, found, nullptr, channels, dx + (line * x.width + v) * channels);
      }
  });
}

// Each part of the lines has sums of its own, [taps, channels], which are added up at the end in their order.
inline void weight_gradient_by_channel(const Call& call, const Window& w, const Image& x, const Image& y,
                                       const float* image, const float* dy, float* dw) {
  const Index channels = x.channels, taps = w.taps(), lines = y.count * y.height;
  const Index parts = std::max<Index>(1, std::min<Index>(16, lines / 8));
  float* sums = scratch(0, parts * taps * channels);
  call.parallel(parts, [&](Index part) {
    float* own = sums + part * taps * channels;
    std::fill(own, own + taps * channels, 0.f);
    for (Index line = lines * part / parts; line < lines * (part + 1) / parts; line++) {
      const Index n = line / y.height, top = line % y.height * w.strides[0] - w.pads[0];
      for (Index i = 0; i < w.kernel[0]; i++) {
        const Index h = top + i * w.dilations[0];
        if (h < 0 || h >= x.height) continue;
        for (Index j = 0; j < w.kernel[1]; j++) {
          const Index right = j * w.dilations[1] - w.pads[1];
          const Index begin = right >= 0 ? 0 : ceiling(-right, w.strides[1]), room = x.width - 1 - right;
          const Index end = room < 0 ? 0 : std::min(room / w.strides[1] + 1, y.width);
          float* to = own + (i * w.kernel[1] + j) * channels;
          const float* from = image + ((n * x.height + h) * x.width + begin * w.strides[1] + right) * channels;
          const float* outer = dy + (line * y.width + begin) * channels;
          const Index step = w.strides[1] * channels;
          Index c = 0;
          for (; c + kLanes <= channels; c += kLanes) {
            V a = load(to + c), b{};
            Index v = begin;
            for (; v + 1 < end; v += 2) {
              a += load(from + (v - begin) * step + c) * load(outer + (v - begin) * channels + c);
              b += load(from + (v + 1 - begin) * step + c) * load(outer + (v + 1 - begin) * channels + c);
            }
            if (v < end) a += load(from + (v - begin) * step + c) * load(outer + (v - begin) * channels + c);
            store(to + c, a + b);
          }
          for (; c < channels; c++)
            for (Index v = begin; v < end; v++) to[c] += from[(v - begin) * step + c] * outer[(v - begin) * channels + c];
        }
      }
    }
  });
  for (Index c = 0; c < channels; c++)
    for (Index tap = 0; tap < taps; tap++) {
      float total = 0;
      for (Index part = 0; part < parts; part++) total += sums[(part * taps + tap) * channels + c];
      dw[c * taps + tap] = total;
    }
}

}  // namespace ONWARD_ISA
}  // namespace onward
