"""Each engine on ONNX's own tests: a case passes, or is listed with the reason why it does not."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformity import DEPENDS, kinds, listed, outcome
from marks import needs
from node_tests import onnx_node_tests
from representatives import by_mode, by_operators, first_of_each

from onward import engines
from onward.engines import ENGINES, framework
from onward.engines.availability import UNWRITTEN, lacking
from onward.engines.framework import framework_class

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


FRAMEWORKS = [pytest.param(name, marks=needs(name)) for name in ENGINES if name != "onnxruntime"]
NODE_TESTS = {name: (case.proto(), dict(enumerate(case.data[0][0]))) for name, case in onnx_node_tests().items()}
REPRESENTATIVES = set(first_of_each(NODE_TESTS, by_mode))
OPERATORS = set(first_of_each(NODE_TESTS, by_operators))


def quick(name: str, kind: str, engine: str) -> bool:
    """Of cases that are alike, one on every engine (on JAX and Keras, of each operator), and all on numpy."""
    if kind != "node":
        return kind == "simple" or (kind != "real" and engine == "onnxruntime")
    some = OPERATORS if engine in ("jax", "keras") else REPRESENTATIVES
    return engine == "numpy" or ("_expanded" not in name and name in some)


def cases() -> Iterator[Any]:
    for (name, kind), engine in itertools.product(kinds().items(), ENGINES):
        slow = () if quick(name, kind, engine) else (pytest.mark.slow,)
        yield pytest.param(name, engine, marks=(needs(engine), *slow))


@pytest.mark.slow(
    "test_affine_grid_2d-jax",
    "test_ai_onnx_ml_tree_ensemble_single_tree-jax",
    "test_attention_local_window_gqa_rank4_mask_expanded-numpy",
    "test_basic_deform_conv_with_padding-jax",
    "test_gridsample-jax",
    "test_qlinearconv-jax",
    "test_roialign_aligned_false-jax",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "engine"), list(cases()))
def test_a_case_passes_or_is_listed(name: str, engine: str) -> None:
    passed, reason = outcome(name, engine)
    known = listed(name, engine)
    if known is None or not known.startswith(DEPENDS):
        assert passed == (known is None), reason or f"it passes, and is listed: {known}"


def test_families_are_those_of_the_tables() -> None:
    assert tuple(FAMILIES) == framework.FAMILIES


def test_tables_have_the_same_files() -> None:
    """Only text and files are numpy's alone; it takes control flow and sequences from the shared rows, as all may."""
    folder = Path(framework.__file__).parent
    files = {engine: {path.stem for path in (folder / engine).glob("*.py")} for engine in ENGINES}
    common = {"__init__", "types", *(family for family in FAMILIES if family not in ("control", "sequence", "host"))}
    assert files["numpy"] == common | {"host"}
    for engine in engines.FRAMEWORKS:
        assert common | {"control"} <= files[engine]
        assert files[engine].isdisjoint({"sequence", "host"})


@pytest.mark.parametrize("engine", [*FRAMEWORKS, "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tables_have_the_same_rows_in_the_same_order(engine: str, family: str) -> None:
    try:
        module = importlib.import_module(f"onward.engines.{engine}.{family}")
    except ModuleNotFoundError:
        return  # all of it is shared, or expressed by other operators: the cases above tell
    assert list(module.operators) == [name for name in FAMILIES[family] if name in module.operators]


@pytest.mark.parametrize("engine", FRAMEWORKS)
def test_what_an_engine_lacks_has_a_reason(engine: str) -> None:
    missing = lacking(framework_class(engine))
    assert not [name for name, reason in missing.items() if reason == UNWRITTEN]
