"""Reading and writing: nothing is lost, nothing of the caller's is changed, and what is wrong is said."""

import subprocess
import sys

import numpy as np
import onnx
import onnx.parser
import pytest
from models import comparable, digits_mlp, small_cnn
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.model.state import hyperparameters, states


@pytest.fixture
def training():
    return onward.prepare(digits_mlp(), loss="cross_entropy", optimizer="adam:lr=0.5")


# ---- what the graph library does not know ----------------------------------------------------------------------------


def with_unknown_field(message, text):
    """The message with a field 999 that no schema has."""
    data = text.encode()
    message.MergeFromString(b"\xba\x3e" + bytes([len(data)]) + data)


def sparse_model():
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2,3] x) => (float[2,3] y) { y = Add(x, s) }'
    )
    values = numpy_helper.from_array(np.array([5.0, 7.0], np.float32), "s")
    indices = numpy_helper.from_array(np.array([1, 4], np.int64), "")
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 3]))
    return proto


def test_fields_of_other_schemas_are_kept(training):
    proto = training.to_proto()
    info = proto.training_info[0]
    places = [
        proto,
        proto.graph,
        proto.graph.node[1],
        proto.graph.input[0],
        proto.graph.output[0],
        proto.functions[0],
        proto.functions[0].node[0],
        info,
        info.algorithm,
        info.algorithm.node[2],
        info.initialization,
    ]
    for i, place in enumerate(places):
        with_unknown_field(place, f"secret {i}")
    again = onward.transform.rename(proto, {"fc1.weight": "first"}).to_proto()
    written = again.SerializeToString()
    assert [i for i in range(len(places)) if f"secret {i}".encode() not in written] == []
    assert onward.load(proto).copy().to_proto() == proto


def test_sparse_initializers_are_kept_and_can_be_read():
    proto = sparse_model()
    model = onward.load(proto)
    assert comparable(model.copy().to_proto()) == comparable(proto)
    dense = model.graph.initializers["s"].const_value.numpy()
    np.testing.assert_array_equal(dense, np.array([[0, 5, 0], [0, 7, 0]], np.float32))
    renamed = onward.transform.rename(model, {"s": "t"}).to_proto()
    assert [sparse.values.name for sparse in renamed.graph.sparse_initializer] == ["t"]


def test_a_sparse_initializer_of_impossible_size_is_not_expanded():
    proto = sparse_model()
    proto.graph.sparse_initializer[0].dims[:] = [1 << 40, 1 << 40]
    model = onward.load(proto)
    assert comparable(model.to_proto()) == comparable(proto)
    with pytest.raises(onward.Error, match="when expanded"):
        model.graph.initializers["s"].const_value.numpy()


def test_sparse_attributes_and_map_types_are_kept():
    values = numpy_helper.from_array(np.array([1.0], np.float32), "")
    indices = numpy_helper.from_array(np.array([0], np.int64), "")
    sparse = helper.make_sparse_tensor(values, indices, [4])
    nodes = [
        helper.make_node("Constant", [], ["c"], sparse_value=sparse),
        helper.make_node("ZipMap", ["x"], ["z"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]),
    ]
    maps = helper.make_sequence_type_proto(
        helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    )
    outputs = [helper.make_tensor_value_info("c", TensorProto.FLOAT, [4]), helper.make_value_info("z", maps)]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2])], outputs)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    proto = helper.make_model(graph, ir_version=10, opset_imports=imports)
    assert onward.load(proto).copy().to_proto() == proto


def test_notes_metadata_and_quantization_annotations_are_kept():
    proto = digits_mlp()
    proto.metadata_props.add(key="who", value="me")
    proto.graph.doc_string = "a graph"
    proto.graph.metadata_props.add(key="k", value="v")
    proto.graph.node[0].doc_string = "a node"
    proto.graph.node[0].metadata_props.add(key="n", value="1")
    proto.graph.initializer[0].metadata_props.add(key="t", value="2")
    proto.graph.initializer[0].doc_string = "a tensor"
    proto.graph.value_info.append(helper.make_tensor_value_info("nothing", TensorProto.FLOAT, [1]))
    annotation = proto.graph.quantization_annotation.add(tensor_name="hidden")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="fc1.bias")
    assert onward.load(proto).copy().to_proto() == proto


# ---- what is in a training model -------------------------------------------------------------------------------------


def test_state_has_names_roles_and_tags(training):
    roles = {state.name: state.role for state in states(training)}
    assert roles["fc1.weight"] == "parameter"
    assert roles["fc1.weight/exp_avg"] == "optimizer_state"
    assert roles["step"] == "counter"
    slot = next(state for state in states(training) if state.name == "fc2.bias/exp_avg_sq")
    assert (slot.parameter, slot.slot) == ("fc2.bias", "exp_avg_sq")
    tensor = next(t for t in training.to_proto().training_info[0].algorithm.initializer if t.name == slot.name)
    assert {entry.key: entry.value for entry in tensor.metadata_props} == {
        "train.role": "optimizer_state",
        "train.param": "fc2.bias",
        "train.slot": "exp_avg_sq",
        "train.group": "group0",
    }


def test_hyperparameters_are_edited_without_touching_a_node(training, tmp_path):
    assert hyperparameters(training)["group0/lr"] == 0.5
    nodes = [node.SerializeToString() for node in training.to_proto().training_info[0].algorithm.node]
    training.set("group0/lr", 0.1)
    training.save(tmp_path / "t.onnx")
    again = onward.load(tmp_path / "t.onnx")
    assert hyperparameters(again)["group0/lr"] == 0.1
    assert [node.SerializeToString() for node in again.to_proto().training_info[0].algorithm.node] == nodes


def test_setting_checks_name_and_shape(training):
    with pytest.raises(onward.Error, match="no initializer `group0/rl`") as error:
        training.set("group0/rl", 1.0)
    assert "group0/lr" in error.value.hint
    with pytest.raises(onward.Error, match="has shape"):
        training.set("fc1.bias", [1.0, 2.0])


def test_the_combined_graph_is_valid_onnx(training):
    combined = training.combined()
    import onnx_ir as ir

    onnx.checker.check_model(ir.to_proto(combined), full_check=True)
    assert [value.name for value in combined.graph.inputs] == ["image", "labels"]


def test_a_copy_shares_nothing_that_changes(training):
    before = training.to_proto()
    copy = training.copy()
    copy.set("group0/lr", 9.0)
    copy.graph.initializers["fc1.bias"].name = "other"
    copy.steps[0].update.clear()
    assert training.to_proto() == before


def test_missing_step_names_the_way_out():
    model = onward.load(digits_mlp())
    with pytest.raises(onward.Error, match="no step 0") as error:
        model.step()
    assert "prepare" in error.value.hint


@pytest.mark.parametrize("data", ["auto", "none", "data", "safetensors"])
def test_saving_and_reading_again(data, tmp_path):
    training = onward.prepare(small_cnn(), loss="cross_entropy", optimizer="adam")
    expected = {v.name: v.const_value.numpy() for v in training.initializers()}
    training.save(tmp_path / "t.onnx", data=data)
    again = onward.load(tmp_path / "t.onnx")
    for value in again.initializers():
        np.testing.assert_array_equal(value.const_value.numpy(), expected[value.name])
    assert [step.update for step in again.steps] == [step.update for step in training.steps]
    onnx.checker.check_model(str(tmp_path / "t.onnx"))


def test_a_model_without_a_folder_cannot_point_at_files():
    proto = digits_mlp()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    for source in (proto, proto.SerializeToString()):
        with pytest.raises(onward.Error):
            onward.load(source)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def test_a_state_variable_bound_twice_is_refused(training):
    proto = training.to_proto()
    proto.training_info[0].update_binding.add(key="step", value="step/new")
    with pytest.raises(onward.Error, match="twice") as error:
        onward.load(proto)
    assert "onward check" in error.value.hint


def test_a_value_computed_twice_is_refused():
    proto = digits_mlp()
    proto.graph.node[1].output[0] = "hidden"
    with pytest.raises(onward.Error, match="not valid ONNX"):
        onward.load(proto)


def test_a_graph_out_of_order_is_refused_where_order_matters():
    proto = digits_mlp()
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    model = onward.load(proto)
    with pytest.raises(onward.Error, match="is computed only later"):
        model.copy()


# ---- large models ----------------------------------------------------------------------------------------------------

LARGE = """
import re, sys, time
from pathlib import Path
import onward

onward.load  # imports are not part of opening

def peak():  # getrusage would count what the parent had before this program began
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

start = time.perf_counter()
model = onward.load(sys.argv[1])
opened, after_open = time.perf_counter() - start, peak()
model.set("group0/lr", 0.25)
model.save(sys.argv[1])
print(opened, after_open, peak())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_a_training_model_of_4_gib_opens_and_saves_without_its_weights(tmp_path):
    """Half of the data is parameters, half is what the optimizer keeps; the files are sparse on disk."""
    count, size = 32, 32 << 20
    small = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1,0,0,1}>'
        "{ y = MatMul(x, w) }"
    )
    proto = onward.prepare(small, loss="mse", optimizer="adam:lr=0.5").to_proto()
    for i, graph in enumerate((proto.graph, proto.training_info[0].algorithm)):
        for k in range(count):
            tensor = graph.initializer.add(
                name=f"weight{i}.{k}", data_type=TensorProto.FLOAT, dims=[4096, size // 8192]
            )
            tensor.data_location = TensorProto.EXTERNAL
            entries = {"location": "big.data", "offset": (i * count + k) * 2 * size, "length": 2 * size}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=str(value))
    with open(tmp_path / "big.data", "wb") as file:
        file.truncate(4 << 30)
    (tmp_path / "big.onnx").write_bytes(proto.SerializeToString())
    done = subprocess.run(
        [sys.executable, "-c", LARGE, tmp_path / "big.onnx"], capture_output=True, text=True, check=True
    )
    opened, after_open, after_save = map(float, done.stdout.split())
    assert opened < 2 and after_open < 300 and after_save < 300 + 2 * size / 2**20
    assert hyperparameters(onward.load(tmp_path / "big.onnx"))["group0/lr"] == 0.25
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big.data", "big.onnx"]
