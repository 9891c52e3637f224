// All kernels, for one set of instructions: this file is compiled once for each.
#include "convolution.h"
#include "depthwise.h"
#include "elementwise.h"
#include "images.h"
#include "normalization.h"
#include "winograd.h"

namespace onward {
namespace ONWARD_ISA {

std::vector<Operator> operators() {
  const Port number, sizes{kInt64}, maybe{kFloat, kOptional};
  return {
      {"Conv", {number, number, maybe}, {number}, make_kernel<Conv>},
      {"ConvInputGradient", {number, number, sizes}, {number}, make_kernel<ConvInputGradient>},
      {"ConvWeightGradient", {number, number}, {number}, make_kernel<ConvWeightGradient>},
      {"BatchNormalization", {number, number, number}, {number, maybe, maybe}, make_kernel<BatchNormalization>},
      {"BatchNormalizationGradient",
       {number, number, number, number, number, number},
       {maybe, maybe, maybe},
       make_kernel<BatchNormalizationGradient>},
      {"ChannelsLast", {number}, {number}, make_kernel<ChannelsLast>},
      {"MaxPool", {number}, {number}, make_kernel<MaxPool>},
      {"MaxPoolGradient", {number, number}, {number}, make_kernel<MaxPoolGradient>},
      {"ReluGradient", {number, number}, {number}, make_kernel<ReluGradient>},
  };
}

}  // namespace ONWARD_ISA
}  // namespace onward
