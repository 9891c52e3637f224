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
        Relu LeakyRelu PRelu Elu Celu Selu Gelu Mish Swish SwiGLU HardSigmoid HardSwish Sigmoid Softplus Softsign
        Shrink ThresholdedRelu Softmax LogSoftmax Hardmax
        QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearMatMul QLinearConv MatMulInteger ConvInteger
    """,
    "algebra": """
        MatMul Gemm Einsum Det onward.Linear
        ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
        ReduceSumSquare ArgMax ArgMin CumSum CumProd TopK
        DFT STFT
    """,
    "movement": """
        Shape Size Reshape Flatten Squeeze Unsqueeze Transpose Concat Split Slice Expand Tile Pad CenterCropPad
        DepthToSpace SpaceToDepth ReverseSequence Trilu ConstantOfShape EyeLike Range ConcatFromSequence SplitToSequence
        Gather GatherElements GatherND ScatterElements ScatterND TensorScatter OneHot Compress NonZero Unique
        NonMaxSuppression
    """,
    "spatial": """
        Conv ConvTranspose DeformConv CausalConvWithState Col2Im
        MaxPool AveragePool LpPool GlobalMaxPool GlobalAveragePool GlobalLpPool MaxUnpool MaxRoiPool RoiAlign
        Resize GridSample AffineGrid
    """,
    "layers": """
        BatchNormalization LayerNormalization RMSNormalization GroupNormalization InstanceNormalization LRN
        LpNormalization MeanVarianceNormalization
        Attention LinearAttention RotaryEmbedding
        RNN GRU LSTM
        SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss
        Dropout Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike
    """,
    "control": """
        If Loop Scan SequenceMap
    """,
    "sequence": """
        SequenceConstruct SequenceEmpty SequenceLength SequenceAt SequenceInsert SequenceErase Optional
        OptionalHasElement OptionalGetElement
    """,
    "host": """
        MelWeightMatrix HannWindow HammingWindow BlackmanWindow
        StringConcat StringNormalizer StringSplit RegexFullMatch TfIdfVectorizer ImageDecoder
        ai.onnx.ml.ArrayFeatureExtractor ai.onnx.ml.Binarizer ai.onnx.ml.LabelEncoder ai.onnx.ml.TreeEnsemble
    """,
}
FAMILIES = {family: names.split() for family, names in _ROWS.items()}
