// Derivatives of elementwise functions in one pass over memory.
#pragma once
#include "vectors.h"

namespace onward {
namespace ONWARD_ISA {

constexpr Index kElementsOfTask = 16384;

struct ReluGradient : Kernel {  // dy, y
  explicit ReluGradient(const Attributes&) {}
  void compute(const Call& call) const override {
    const auto dy = call.input(0), y = call.input(1);
    require(dy.sizes == y.sizes, "a gradient has the shape of what it is of");
    auto dx = call.output(0, y.sizes);
    split(call, y.size(), kElementsOfTask, [&](Index first, Index last) {
      Index i = first;
      for (; i + kLanes <= last; i += kLanes) store(dx.data + i, select(load(y.data + i) > V{}, load(dy.data + i), V{}));
      for (; i < last; i++) dx.data[i] = y.data[i] > 0 ? dy.data[i] : 0;
    });
  }
};

}  // namespace ONWARD_ISA
}  // namespace onward
