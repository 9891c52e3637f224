// All kernels, for one set of instructions: this file is compiled once for each.
#include "convolution.h"
#include "depthwise.h"
#include "elementwise.h"
#include "embedding.h"
#include "matrix.h"
#include "normalization.h"
#include "pooling.h"
#include "programs.h"

namespace onward {
namespace ONWARD_ISA {

std::vector<Operator> operators() {
  const Port number, sizes{kInt64}, maybe{kFloat, kOptional}, many{kFloat, kVariadic};
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
      {"TransposedProduct", {number, number}, {number}, make_kernel<TransposedProduct>},
      {"LeadingSum", {number}, {number}, make_kernel<LeadingSum>},
      {"LookupGradient", {sizes, number, sizes}, {number}, make_kernel<LookupGradient>},
      {"Elementwise", {many}, {many}, make_kernel<Elementwise>},
      {"ReluGradient", {number, number}, {number}, make_kernel<ReluGradient>},
  };
}

}  // namespace ONWARD_ISA
}  // namespace onward
