// Transposed convolutions of channels-last images: what the gradient of a convolution does.
#pragma once
#include "convolution.h"

namespace onward {
namespace ONWARD_ISA {

struct ConvTranspose : Kernel {  // x, weights [C, O / groups, height, width], bias
  explicit ConvTranspose(const Attributes& a) : window(a), more(a.integers("output_padding", {0, 0})) {
    require(more.size() == 2, "a convolution has two axes");
  }
  void compute(const Call& call) const override {
    const auto x = call.input(0), w = call.input(1), b = call.input(2);
    const Image image(x.sizes);
    require(w.sizes.size() == 4 && w.sizes[0] == image.channels && image.channels % window.groups == 0 &&
                w.sizes[2] == window.kernel[0] && w.sizes[3] == window.kernel[1],
            "weights of a convolution do not fit its image");
    const Image y({image.count, outputs(0, image.height), outputs(1, image.width), w.sizes[1] * window.groups});
    require(!b || b.size() == y.channels, "a convolution has a bias of each channel");
    require(y.height >= 0 && y.width >= 0, "a window of a transposed convolution does not fit its pads");
    check_gradient(window, y, image);
    auto out = call.output(0, {y.count, y.height, y.width, y.channels});
    if (x.size() == 0)
      fill_pixels(out.data, y.pixels(), y.channels, b.data);
    else
      image_gradient_quickly(call, window, y, image, x.data, w.data, b.data, out.data);
  }
  Index outputs(int axis, Index size) const {
    const Index pads = window.pads[axis] + window.pads[axis + 2];
    return (size - 1) * window.strides[axis] + window.covered(axis) + more[static_cast<size_t>(axis)] - pads;
  }
  Window window;
  std::vector<Index> more;  // pixels at the end, beyond the last window
};

}  // namespace ONWARD_ISA
}  // namespace onward
