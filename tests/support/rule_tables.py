"""The cases that the table of derivatives is compared by, and those of the standard's that it cannot be compared by."""

import importlib
import pkgutil

import gradcheck
import rule_cases
from node_tests import onnx_node_tests

from onward.rules import RULES, NoGradient

AT_A_KINK = "its example lies on a kink, where differences see both sides"
AT_AN_END = "its example lies at the end of the domain, where the derivative is infinite"
SINGLE = "the reference evaluator computes it in float32"
NOT_FINITE = "its example holds infinities"
RANDOM = "its result is random"
LENGTH = "moving its inputs changes how many elements there are"
SCALAR_AXES = "the reference evaluator takes no Squeeze with a single number for its axes"
TRAINING = "a step of an optimizer, which is lowered and not differentiated"

EXCLUDED = {
    "test_acosh_example": AT_AN_END,
    "test_adagrad": TRAINING,
    "test_adagrad_multiple": TRAINING,
    "test_adam": TRAINING,
    "test_adam_multiple": TRAINING,
    "test_affine_grid_2d_align_corners_expanded": SCALAR_AXES,
    "test_affine_grid_2d_expanded": SCALAR_AXES,
    "test_affine_grid_3d_align_corners_expanded": SCALAR_AXES,
    "test_affine_grid_3d_expanded": SCALAR_AXES,
    "test_bernoulli_double_expanded": RANDOM,
    "test_bernoulli_expanded": RANDOM,
    "test_bernoulli_seed_expanded": RANDOM,
    "test_castlike_BFLOAT16_to_FLOAT": NOT_FINITE,
    "test_celu_bfloat16": AT_A_KINK,
    "test_celu_float16": AT_A_KINK,
    "test_elu_example": AT_A_KINK,
    "test_gelu_default_1": SINGLE,
    "test_gelu_default_2": SINGLE,
    "test_leakyrelu_example": AT_A_KINK,
    "test_maxpool_3d_dilations": "its example has ties",
    "test_maxpool_3d_dilations_use_ref_impl": "its example has ties",
    "test_mod_float_edge_cases_fmod_0_float16": NOT_FINITE,
    "test_mod_float_edge_cases_fmod_0_float32": NOT_FINITE,
    "test_mod_float_edge_cases_fmod_0_float64": NOT_FINITE,
    "test_momentum": TRAINING,
    "test_momentum_multiple": TRAINING,
    "test_nesterov_momentum": TRAINING,
    "test_onehot_with_bfloat16_values": LENGTH,
    "test_pow": AT_AN_END,
    "test_range_bfloat16_type_positive_delta_expanded": LENGTH,
    "test_range_float16_type_positive_delta_expanded": LENGTH,
    "test_range_float_type_positive_delta_expanded": LENGTH,
    "test_reduce_min_default_axes_keepdims_example": "its example has a tie of three",
    "test_scan_sum": "the reference evaluator does not run Scan of operator set 8",
    "test_selu_example": AT_A_KINK,
    "test_thresholdedrelu_example": AT_A_KINK,
    "test_upsample_nearest": "the reference evaluator takes no scales but integers for Upsample",
}
"""Node tests that cannot be compared with differences, and why. What holds for an operator holds for its body."""

ALIGN_CORNERS = "ONNX Runtime's Resize departs from the standard's text for align_corners with scales"
NO_MOD = "ONNX Runtime has no Mod of floats without fmod"
NO_SWISH = "ONNX Runtime has no Swish, which the gradient needs the result of"
NO_BFLOAT16 = "ONNX Runtime has no bfloat16 on CPUs"

EXCLUDED_ON_ONNXRUNTIME = {
    "test_dequantizelinear_float4e2m1": "ONNX Runtime casts no float4",
    "test_mod_float16_mixed_sign_fmod_0": NO_MOD,
    "test_mod_float32_mixed_sign_fmod_0": NO_MOD,
    "test_mod_float64_mixed_sign_fmod_0": NO_MOD,
    "test_resize_downsample_scales_cubic_align_corners": ALIGN_CORNERS,
    "test_resize_downsample_scales_linear_align_corners": ALIGN_CORNERS,
    "test_swiglu_alpha_expanded": NO_SWISH,
    "test_swiglu_expanded": NO_SWISH,
    "test_swiglu_float16_expanded": NO_SWISH,
}


FAMILIES = [
    importlib.import_module(f"rule_cases.{module.name}") for module in pkgutil.iter_modules(rule_cases.__path__)
]
for family in FAMILIES:
    EXCLUDED |= getattr(family, "EXCLUDED", {})
    EXCLUDED_ON_ONNXRUNTIME |= getattr(family, "EXCLUDED_ON_ONNXRUNTIME", {})
    gradcheck.OPERATORS += getattr(family, "EVALUATORS", [])


def excluded(name):
    """Why a node test cannot be compared; None if it can."""
    return EXCLUDED.get(name) or EXCLUDED.get(name.partition("_expanded")[0])


def known(node):
    """What the table says about a node."""
    return RULES.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))


def comparable_node_tests():
    """Node tests with floating-point inputs and outputs, of operators through which a gradient flows."""
    for case in onnx_node_tests().values():
        proto = case.proto()
        inputs = dict(zip((v.name for v in proto.graph.input), case.data[0][0], strict=False))
        if not gradcheck.differentiable(proto, inputs) or not gradcheck.float_outputs(proto):
            continue
        if excluded(case.name) or all(isinstance(known(node), NoGradient) for node in proto.graph.node):
            continue
        yield case.name, proto, inputs


BODIES, CASES, EDGES = {}, {}, {}
for _name, _proto, _inputs in comparable_node_tests():
    (CASES if len(_proto.graph.node) == 1 else BODIES)[_name] = _proto, _inputs
for family in FAMILIES:
    short = family.__name__.partition(".")[2]
    CASES |= {f"{short}_{name}": case for name, case in family.CASES.items()}
    EDGES |= {f"{short}_{name}": edge for name, edge in getattr(family, "EDGES", {}).items()}
    EDGES |= {f"{short}_{name}": edge for name, edge in getattr(family, "STRAIGHT_THROUGH", {}).items()}
ALL = CASES | BODIES


def without_onnxruntime(name):
    """Why ONNX Runtime does not run a case; None if it must."""
    if any(gradcheck.is_bfloat16(x) for x in ALL[name][1].values()):
        return NO_BFLOAT16
    return EXCLUDED_ON_ONNXRUNTIME.get(name)
