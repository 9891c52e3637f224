"""Products of matrices: what the standard's node tests leave out."""

import numpy as np
import onnx
from onnx import TensorProto, helper


def _case(operator, outputs, /, *shapes, opset=18, names="ABCDE", **attributes):
    rng = np.random.default_rng(0)
    inputs = {names[i]: rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    node = helper.make_node(operator, list(inputs), ["Y"], **attributes)
    graph = helper.make_graph(
        [node],
        operator,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in inputs.items()],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, outputs)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), inputs


def _einsum(equation, output, *shapes):
    return _case("Einsum", output, *shapes, equation=equation)


CASES: dict[str, tuple[onnx.ModelProto, dict[str, np.ndarray]]] = {
    "matmul_vector_matrix": _case("MatMul", [4], (3,), (3, 4)),
    "matmul_matrix_vector": _case("MatMul", [2], (2, 3), (3,)),
    "matmul_batch_vector": _case("MatMul", [5, 2], (5, 2, 3), (3,)),
    "matmul_vector_batch": _case("MatMul", [5, 4], (3,), (5, 3, 4)),
    "matmul_weight": _case("MatMul", [2, 5, 4], (2, 5, 3), (3, 4)),
    "matmul_left_weight": _case("MatMul", [2, 5, 4], (5, 3), (2, 3, 4)),
    "matmul_broadcast_both": _case("MatMul", [2, 6, 5, 4], (2, 1, 5, 3), (6, 3, 4)),
    "einsum_trace": _einsum("ii->", [], (3, 3)),
    "einsum_diagonal": _einsum("ii->i", [3], (3, 3)),
    "einsum_diagonal_of_three": _einsum("iii->i", [3], (3, 3, 3)),
    "einsum_diagonal_times_vector": _einsum("iij,j->ij", [3, 2], (3, 3, 2), (2,)),
    "einsum_summed_in_one_operand": _einsum("ijk,jl->il", [2, 5], (2, 3, 4), (3, 5)),
    "einsum_sum_of_all": _einsum("ij->", [], (2, 3)),
    "einsum_outer": _einsum("i,j->ji", [3, 2], (2,), (3,)),
    "einsum_implicit_output": _einsum("ij,jk", [2, 4], (2, 3), (3, 4)),
    "einsum_implicit_sorted": _einsum("ba", [3, 2], (2, 3)),
    "einsum_three_operands": _einsum("ij,jk,kl->il", [2, 5], (2, 3), (3, 4), (4, 5)),
    "einsum_ellipsis": _einsum("...ij,...jk->...ik", [5, 2, 4], (5, 2, 3), (5, 3, 4)),
    "einsum_ellipsis_of_different_lengths": _einsum("...ij,...jk->...ik", [6, 5, 2, 4], (6, 5, 2, 3), (5, 3, 4)),
    "einsum_ellipsis_stretched": _einsum("...ij,...jk->...ik", [5, 2, 4], (5, 2, 3), (1, 3, 4)),
    "einsum_ellipsis_in_the_middle": _einsum("i...j,j->...i", [4, 5, 2], (2, 4, 5, 3), (3,)),
    "einsum_ellipsis_implicit": _einsum("...ij", [5, 2, 3], (5, 2, 3)),
    "einsum_spaces": _einsum(" bij , bjk -> bik ", [5, 2, 4], (5, 2, 3), (5, 3, 4)),
    "det_of_one": _case("Det", [2], (2, 1, 1)),
    "det_of_four": _case("Det", [2], (2, 4, 4)),
}

_SINGULAR = np.array([[[1, 2, 3], [2, 4, 6], [1, 0, 1]], [[0, 0, 0], [0, 1, 0], [0, 0, 0]]], np.float32)
CASES["det_of_singular"] = (_case("Det", [2], (2, 3, 3))[0], {"A": _SINGULAR})
