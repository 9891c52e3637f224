// Convolutions in which each channel has a kernel of its own: vectors run along channels.
#pragma once
#include "convolution.h"

namespace onward {
namespace ONWARD_ISA {

// Kernels as [taps, channels], perhaps turned around.
inline const float* turned(const float* weights, Index channels, Index taps, bool backwards) {
  float* to = scratch(0, channels * taps);
  for (Index c = 0; c < channels; c++)
    for (Index tap = 0; tap < taps; tap++)
      to[(backwards ? taps - 1 - tap : tap) * channels + c] = weights[c * taps + tap];
  return to;
}

// Where vectors of channels begin: the last one may overlap the one before. There are at least as many channels as lanes.
template <class Function>
void each_vector(Index channels, const Function& function) {
  Index c = 0;
  for (; c + kLanes <= channels; c += kLanes) function(c);
  if (c < channels) function(channels - kLanes);
}

// For which outputs along an axis all taps of a window are inside of an image.
struct Inside {
  Index first, last;
  Inside(const Window& w, int axis, Index size, Index outputs) {
    first = std::min(ceiling(w.pads[axis], w.strides[axis]), outputs);
    const Index room = size + w.pads[axis] - w.covered(axis);
    last = std::max(room < 0 ? first : std::min(room / w.strides[axis] + 1, outputs), first);
  }
};

// A vector of channels along a line of outputs for which all columns of the window are inside, and some of its rows:
// the kernel stays in registers.
template <int size>
void convolve_line(const float* image, Index row_step, Index tap_step, Index step, const float* kernels, Index channels,
                   Index first_row, Index last_row, V bias, Index count, float* out) {
  V w[size][size];
  for (int i = 0; i < size; i++)
    for (int j = 0; j < size; j++)
      w[i][j] = i >= first_row && i < last_row ? load(kernels + (i * size + j) * channels) : V{};
  if (first_row == 0 && last_row == size) {
    for (Index v = 0; v < count; v++, image += step, out += channels) {
      V sum = bias;
#pragma GCC unroll 5
      for (int i = 0; i < size; i++)
#pragma GCC unroll 5
        for (int j = 0; j < size; j++) sum += load(image + i * row_step + j * tap_step) * w[i][j];
      store(out, sum);
    }
    return;
  }
  for (Index v = 0; v < count; v++, image += step, out += channels) {
    V sum = bias;
    for (Index i = first_row; i < last_row; i++)
      for (int j = 0; j < size; j++) sum += load(image + i * row_step + j * tap_step) * w[i][j];
    store(out, sum);
  }
}

// A single output, whatever of its window is inside.
inline void convolve_pixel(const Window& w, const Image& x, const float* image, Index top, Index left,
                           const float* kernels, const float* bias, float* out) {
  const Index channels = x.channels;
  for (Index c = 0; c < channels; c += kLanes) {
    const Index lanes = std::min<Index>(channels - c, kLanes);
    const bool full = lanes == kLanes;
    V sum = bias == nullptr ? V{} : full ? load(bias + c) : load_some(bias + c, lanes);
    for (Index i = 0; i < w.kernel[0]; i++) {
      const Index h = top + i * w.dilations[0];
      if (h < 0 || h >= x.height) continue;
      for (Index j = 0; j < w.kernel[1]; j++) {
        const Index v = left + j * w.dilations[1];
        if (v < 0 || v >= x.width) continue;
        const float *from = image + (h * x.width + v) * channels + c, *by = kernels + (i * w.kernel[1] + j) * channels + c;
        sum += full ? load(from) * load(by) : load_some(from, lanes) * load_some(by, lanes);
      }
    }
    full ? store(out + c, sum) : store_some(out + c, sum, lanes);
  }
}

using ConvolveLine = void (*)(const float*, Index, Index, Index, const float*, Index, Index, Index, V, Index, float*);

inline ConvolveLine convolve_line_of(const Window& w) {
  if (w.kernel[0] != w.kernel[1]) return nullptr;
  return w.kernel[0] == 3 ? convolve_line<3> : w.kernel[0] == 5 ? convolve_line<5> : nullptr;
}

inline void convolve_with(const Call& call, const Window& w, const Image& x, const Image& y, const float* image,
                          const float* kernels, const float* bias, float* out) {
  const Index channels = x.channels;
  const Inside across(w, 1, x.width, y.width);
  const ConvolveLine along_line = channels >= kLanes ? convolve_line_of(w) : nullptr;
  const Index tap = w.dilations[1] * channels, row = w.dilations[0] * x.width * channels;
  split(call, y.count * y.height, 2, [&](Index first, Index last) {
    for (Index line = first; line < last; line++) {
      const float* one = image + line / y.height * x.height * x.width * channels;
      const Index top = line % y.height * w.strides[0] - w.pads[0];
      float* to = out + line * y.width * channels;
      const auto pixel = [&](Index v) {
        convolve_pixel(w, x, one, top, v * w.strides[1] - w.pads[1], kernels, bias, to + v * channels);
      };
      if (along_line == nullptr) {
        for (Index v = 0; v < y.width; v++) pixel(v);
        continue;
      }
      for (Index v = 0; v < across.first; v++) pixel(v);
      for (Index v = across.last; v < y.width; v++) pixel(v);
      const Index first_row = top >= 0 ? 0 : std::min(ceiling(-top, w.dilations[0]), w.kernel[0]);
      const Index room = x.height - 1 - top;
      const Index last_row = room < 0 ? first_row : std::max(std::min(room / w.dilations[0] + 1, w.kernel[0]), first_row);
      const float* from = one + (top * x.width + across.first * w.strides[1] - w.pads[1]) * channels;
      each_vector(channels, [&](Index c) {
        along_line(from + c, row, tap, w.strides[1] * channels, kernels + c, channels, first_row, last_row,
                   bias == nullptr ? V{} : load(bias + c), across.last - across.first,
                   to + across.first * channels + c);
      });
    }
  });
}

inline void convolve_by_channel(const Call& call, const Window& w, const Image& x, const Image& y, const float* image,
                                const float* weights, const float* bias, float* out) {
  convolve_with(call, w, x, y, image, turned(weights, x.channels, w.taps(), false), bias, out);
}

// The outputs along a line that read inside of the image, `right` of where they stand.
struct Reach {
  Index first, last;
  Reach(const Window& w, const Image& x, const Image& y, Index right) {
    first = right >= 0 ? 0 : ceiling(-right, w.strides[1]);
    const Index room = x.width - 1 - right;
    last = room < 0 ? 0 : std::min(room / w.strides[1] + 1, y.width);
  }
};

// to[v * stride + right] += from[v] * kernel, for a line.
inline void spread_line(const Window& w, const Image& x, const Image& y, const float* from, const float* kernel,
                        Index right, float* to) {
  const Index channels = x.channels;
  const Reach reach(w, x, y, right);
  for (Index v = reach.first; v < reach.last; v++) {
    const float* d = from + v * channels;
    float* t = to + (v * w.strides[1] + right) * channels;
    Index c = 0;
    for (; c + kLanes <= channels; c += kLanes) store(t + c, load(t + c) + load(d + c) * load(kernel + c));
    for (; c < channels; c++) t[c] += d[c] * kernel[c];
  }
}

// With strides of 1, the gradient is a convolution with the kernels turned around; else each pixel asks who has seen it.
inline void image_gradient_by_channel(const Call& call, const Window& w, const Image& x, const Image& y,
                                      const float* dy, const float* weights, const float* bias, float* dx) {
  const Index channels = x.channels;
  const bool is_plain = w.strides[0] == 1 && w.strides[1] == 1 && w.pads[0] < w.covered(0) && w.pads[1] < w.covered(1);
  const float* kernels = turned(weights, channels, w.taps(), is_plain);
  if (is_plain) {
    Window back = w;
    for (int i = 0; i < 2; i++) {
      back.pads[i] = w.covered(i) - 1 - w.pads[i];
      back.pads[i + 2] = (i == 0 ? x.height - y.height : x.width - y.width) + w.covered(i) - 1 - back.pads[i];
    }
    return convolve_with(call, back, y, x, dy, kernels, bias, dx);
  }
  split(call, x.count * x.height, 2, [&](Index first, Index last) {
    for (Index line = first; line < last; line++) {
      const Index n = line / x.height, bottom = line % x.height + w.pads[0];
      float* to = dx + line * x.width * channels;
      fill_pixels(to, x.width, channels, bias);
      for (Index i = 0; i < w.kernel[0]; i++) {
        const Index h = bottom - i * w.dilations[0];
        if (h < 0 || h % w.strides[0] != 0 || h / w.strides[0] >= y.height) continue;
        const float* from = dy + (n * y.height + h / w.strides[0]) * y.width * channels;
        for (Index j = 0; j < w.kernel[1]; j++)
          spread_line(w, x, y, from, kernels + (i * w.kernel[1] + j) * channels, j * w.dilations[1] - w.pads[1], to);
      }
    }
  });
}

// The products of one line of outputs with the lines of the image that it reads, for a vector of channels: sums of all
// taps stay in registers.
template <int size>
void add_products_of_line(const Window& w, const Image& x, const float* image, Index top, Index first, Index last,
                          const float* dy, Index channels, float* sums, Index stride) {
  V s[size][size];
  for (int i = 0; i < size; i++)
    for (int j = 0; j < size; j++) s[i][j] = load(sums + (i * size + j) * stride);
  const float* rows[size];
  static const float kNothing[kLanes] = {};
  Index steps[size];
  for (int i = 0; i < size; i++) {
    const Index h = top + i * w.dilations[0];
    const bool inside = h >= 0 && h < x.height;
    rows[i] = inside ? image + (h * x.width + first * w.strides[1] - w.pads[1]) * channels : kNothing;
    steps[i] = inside ? channels : 0;
  }
  const Index tap = w.dilations[1], step = w.strides[1];
  for (Index v = first; v < last; v++) {
    const V d = load(dy + v * channels);
#pragma GCC unroll 5
    for (int i = 0; i < size; i++) {
#pragma GCC unroll 5
      for (int j = 0; j < size; j++) s[i][j] += d * load(rows[i] + j * tap * steps[i]);
      rows[i] += step * steps[i];
    }
  }
  for (int i = 0; i < size; i++)
    for (int j = 0; j < size; j++) store(sums + (i * size + j) * stride, s[i][j]);
}

// Each part of the lines has sums of its own, [taps, channels], which are added up at the end in their order.
inline void weight_gradient_by_channel(const Call& call, const Window& w, const Image& x, const Image& y,
                                       const float* image, const float* dy, float* dw) {
  const Index channels = x.channels, taps = w.taps(), lines = y.count * y.height;
  const Index parts = std::max<Index>(1, std::min<Index>(16, lines / 8));
  float* sums = scratch(0, parts * taps * channels);
  const bool is_square = w.kernel[0] == w.kernel[1] && channels >= kLanes && channels % kLanes == 0;
  const int size = is_square && (w.kernel[0] == 3 || w.kernel[0] == 5) ? static_cast<int>(w.kernel[0]) : 0;
  const Inside across(w, 1, x.width, y.width);
  call.parallel(parts, [&](Index part) {
    float* own = sums + part * taps * channels;
    std::fill(own, own + taps * channels, 0.f);
    for (Index line = lines * part / parts; line < lines * (part + 1) / parts; line++) {
      const float* one = image + line / y.height * x.height * x.width * channels;
      const Index top = line % y.height * w.strides[0] - w.pads[0];
      const float* d = dy + line * y.width * channels;
      if (size > 0)
        each_vector(channels, [&](Index c) {
          (size == 3 ? add_products_of_line<3> : add_products_of_line<5>)(
              w, x, one + c, top, across.first, across.last, d + c, channels, own + c, channels);
        });
      const auto pixel = [&](Index v) {
        for (Index i = 0; i < w.kernel[0]; i++) {
          const Index h = top + i * w.dilations[0];
          if (h < 0 || h >= x.height) continue;
          for (Index j = 0; j < w.kernel[1]; j++) {
            const Index u = v * w.strides[1] - w.pads[1] + j * w.dilations[1];
            if (u < 0 || u >= x.width) continue;
            float* to = own + (i * w.kernel[1] + j) * channels;
            const float *from = one + (h * x.width + u) * channels, *by = d + v * channels;
            for (Index c = 0; c < channels; c++) to[c] += from[c] * by[c];
          }
        }
      };
      for (Index v = 0; v < (size > 0 ? across.first : y.width); v++) pixel(v);
      for (Index v = size > 0 ? across.last : y.width; v < y.width; v++) pixel(v);
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
