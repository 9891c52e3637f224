// All kernels, for one set of instructions: this file is compiled once for each.
#include "activations.h"
#include "attention.h"
#include "convolution.h"
#include "cross_entropy.h"
#include "depthwise.h"
#include "embedding.h"
#include "images.h"
#include "matrix.h"
#include "mixtures.h"
#include "normalization.h"
#include "programs.h"
#include "recurrent.h"
#include "row_normalization.h"
#include "transposed_convolution.h"
#include "winograd.h"

namespace onward {
namespace ONWARD_ISA {

std::vector<Operator> operators() {
  const Port number, sizes{kInt64}, maybe{kFloat, kOptional}, many{kFloat, kVariadic}, anything{kUndefined, kVariadic},
      lengths{kInt64, kOptional};
  return {
      {"Conv", {number, number, maybe}, {number}, make_kernel<Conv>},
      {"ConvInputGradient", {number, number, sizes}, {number}, make_kernel<ConvInputGradient>},
      {"ConvWeightGradient", {number, number}, {number}, make_kernel<ConvWeightGradient>},
      {"ConvTranspose", {number, number, maybe}, {number}, make_kernel<ConvTranspose>},
      {"BatchNormalization", {number, number, number}, {number, maybe, maybe}, make_kernel<BatchNormalization>},
      {"BatchNormalizationGradient",
       {number, number, number, number, number, number},
       {maybe, maybe, maybe},
       make_kernel<BatchNormalizationGradient>},
      {"ChannelsLast", {number}, {number}, make_kernel<ChannelsLast>},
      {"MaxPool", {number}, {number}, make_kernel<MaxPool>},
      {"MaxPoolGradient", {number, number}, {number}, make_kernel<MaxPoolGradient>},
      {"AveragePool", {number}, {number}, make_kernel<AveragePool>},
      {"AveragePoolGradient", {number, sizes}, {number}, make_kernel<AveragePoolGradient>},
      {"Resize", {number, sizes, number, sizes, number}, {number}, make_kernel<Resize>},
      {"ResizeGradient", {number, sizes, number, sizes, number, sizes}, {number}, make_kernel<ResizeGradient>},
      {"Attention", {number, number, number, maybe}, {number, number}, make_kernel<Attention>},
      {"AttentionGradient",
       {number, number, number, number, number, number, maybe},
       {number, number, number},
       make_kernel<AttentionGradient>},
      {"CrossEntropy", {number, sizes, maybe}, {number, number}, make_kernel<CrossEntropy>},
      {"CrossEntropyGradient", {number, number, number, sizes, maybe}, {number}, make_kernel<CrossEntropyGradient>},
      {"LayerNormalizationGradient",
       {number, number, number, number, number},
       {number, number, number},
       make_kernel<RowNormalizationGradient<true>>},
      {"RMSNormalizationGradient",
       {number, number, number},
       {number, number},
       make_kernel<RowNormalizationGradient<false>>},
      {"SoftmaxGradient", {number, number}, {number}, make_kernel<SoftmaxGradient<false>>},
      {"LogSoftmaxGradient", {number, number}, {number}, make_kernel<SoftmaxGradient<true>>},
      {"Gelu", {number}, {number}, make_kernel<Activation<Gelu>>},
      {"GeluOfTanh", {number}, {number}, make_kernel<Activation<GeluOfTanh>>},
      {"Swish", {number}, {number}, make_kernel<Activation<Swish>>},
      {"GeluGradient", {number, number}, {number}, make_kernel<ActivationGradient<Gelu>>},
      {"GeluOfTanhGradient", {number, number}, {number}, make_kernel<ActivationGradient<GeluOfTanh>>},
      {"SwishGradient", {number, number}, {number}, make_kernel<ActivationGradient<Swish>>},
      {"HardSwishGradient", {number, number}, {number}, make_kernel<ActivationGradient<HardSwish>>},
      {"HardSigmoidGradient", {number, number}, {number}, make_kernel<ActivationGradient<HardSigmoid>>},
      {"SigmoidGradient", {number, number}, {number}, make_kernel<ActivationGradient<Sigmoid>>},
      {"TanhGradient", {number, number}, {number}, make_kernel<ActivationGradient<Tanh>>},
      {"LeakyReluGradient", {number, number}, {number}, make_kernel<ActivationGradient<LeakyRelu>>},
      {"ReluGradient", {number, number}, {number}, make_kernel<ActivationGradient<Relu>>},
      {"Product", {many}, {number}, make_kernel<Product>},
      {"TransposedProduct", {number, number}, {number}, make_kernel<TransposedProduct>},
      {"LeadingSum", {number}, {number}, make_kernel<LeadingSum>},
      {"LookupGradient", {sizes, number, sizes}, {number}, make_kernel<LookupGradient>},
      {"RNN", {number, number, number, lengths}, {number, number}, make_kernel<Recurrent<RnnCell>>},
      {"RNNGradient",
       {number, number, number, maybe, maybe, lengths},
       {number, number, number},
       make_kernel<RecurrentGradient<RnnCell>>},
      {"LSTM",
       {number, number, number, number, lengths},
       {number, number, number, number, number},
       make_kernel<Recurrent<LstmCell>>},
      {"LSTMGradient",
       {number, number, number, number, number, number, maybe, maybe, maybe, lengths},
       {number, number, number, number},
       make_kernel<RecurrentGradient<LstmCell>>},
      {"GRU", {number, number, number, lengths}, {number, number, number}, make_kernel<Recurrent<GruCell>>},
      {"GRUGradient",
       {number, number, number, number, maybe, maybe, lengths},
       {number, number, number, number},
       make_kernel<RecurrentGradient<GruCell>>},
      {"LinearGRU",
       {number, number, number, maybe, lengths},
       {number, number, number},
       make_kernel<Recurrent<LinearGruCell>>},
      {"LinearGRUGradient",
       {number, number, number, number, maybe, maybe, lengths},
       {number, number, number, number},
       make_kernel<RecurrentGradient<LinearGruCell>>},
      {"Elementwise", {many}, {many}, make_kernel<Elementwise>},
      {"Ready", {number, anything}, {number}, make_kernel<Ready>},
  };
}

}  // namespace ONWARD_ISA
}  // namespace onward
