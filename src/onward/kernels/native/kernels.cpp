// All kernels, for one set of instructions: this file is compiled once for each.
#include "attention.h"
#include "convolution.h"
#include "depthwise.h"
#include "elementwise.h"
#include "normalization.h"
#include "pooling.h"

namespace onward {
namespace ONWARD_ISA {

std::vector<Operator> operators() {
  const Port number, sizes{kInt64}, maybe{kFloat, kOptional};
  return {
      {"Conv", {number, number, maybe}, {number}, make_kernel<Conv>},
      {"ConvInputGradient", {number, number, sizes}, {number}, make_kernel<ConvInputGradient>},
      {"ConvWeightGradient", {number, number}, {number}, make_kernel<ConvWeightGradient>},
      {"BatchNormalization", {number, number, number}, {number, number, number}, make_kernel<BatchNormalization>},
      {"BatchNormalizationGradient",
       {number, number, number, number, number},
       {number, number, number},
       make_kernel<BatchNormalizationGradient>},
      {"MaxPool", {number}, {number}, make_kernel<MaxPool>},
      {"MaxPoolGradient", {number, number}, {number}, make_kernel<MaxPoolGradient>},
      {"Attention", {number, number, number, maybe}, {number, number}, make_kernel<Attention>},
      {"AttentionGradient",
       {number, number, number, number, number, number, maybe},
       {number, number, number},
       make_kernel<AttentionGradient>},
      {"ReluGradient", {number, number}, {number}, make_kernel<ReluGradient>},
  };
}

}  // namespace ONWARD_ISA
}  // namespace onward
