"""All operators of the standard in families: the files of an engine's table, with the same rows in the same order."""

from __future__ import annotations

_ROWS = {
    "elementwise": """
        Add Sub Mul Div Mod Pow Max Min Sum Mean
        Abs Neg Sign Reciprocal Sqrt Exp Log Erf Ceil Floor Round
        Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh
        Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Not IsInf IsNaN Where
        BitwiseAnd BitwiseOr BitwiseXor BitwiseNot BitShift
        Identity onward.StopGradient Cast CastLike BitCast Clip
    """,
    "activation": """
        Relu LeakyRelu PRelu Elu Celu Selu Gelu Mish Swish SwiGLU HardSigmoid HardSwish Sigmoid Softplus Softsign
        Shrink ThresholdedRelu Softmax LogSoftmax Hardmax
    """,
    "reduction": """
        ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
        ReduceSumSquare ArgMax ArgMin CumSum CumProd TopK
    """,
    "movement": """
        Shape Size Reshape Flatten Squeeze Unsqueeze Transpose Concat Split Slice Expand Tile Pad CenterCropPad
        DepthToSpace SpaceToDepth ReverseSequence Trilu ConstantOfShape EyeLike Range ConcatFromSequence SplitToSequence
    """,
    "indexing": """
        Gather GatherElements GatherND ScatterElements ScatterND TensorScatter OneHot Compress NonZero Unique
        NonMaxSuppression
    """,
    "matrix": "MatMul Gemm Einsum Det onward.Linear",
    "convolution": "Conv ConvTranspose DeformConv CausalConvWithState Col2Im",
    "pooling": """
        MaxPool AveragePool LpPool GlobalMaxPool GlobalAveragePool GlobalLpPool MaxUnpool MaxRoiPool RoiAlign
    """,
    "grids": "Resize GridSample AffineGrid",
    "normalization": """
        BatchNormalization LayerNormalization RMSNormalization GroupNormalization InstanceNormalization LRN
        LpNormalization MeanVarianceNormalization
    """,
    "attention": "Attention LinearAttention RotaryEmbedding",
    "recurrent": "RNN GRU LSTM",
    "loss": "SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss",
    "quantization": """
        QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearMatMul QLinearConv MatMulInteger ConvInteger
    """,
    "spectral": "DFT STFT MelWeightMatrix HannWindow HammingWindow BlackmanWindow",
    "sampling": """
        Dropout Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike
    """,
    "text": "StringConcat StringNormalizer StringSplit RegexFullMatch TfIdfVectorizer ImageDecoder",
    "classical": """
        ai.onnx.ml.ArrayFeatureExtractor ai.onnx.ml.Binarizer ai.onnx.ml.LabelEncoder ai.onnx.ml.TreeEnsemble
    """,
    "control": "If Loop Scan SequenceMap",
    "sequence": """
        SequenceConstruct SequenceEmpty SequenceLength SequenceAt SequenceInsert SequenceErase Optional
        OptionalHasElement OptionalGetElement
    """,
}
FAMILIES = {family: names.split() for family, names in _ROWS.items()}
