"""Every graph compiled by MindSpore's Ascend backend in a dry run, and its memory in bytes.

No kernel is launched: values, speed, and whether a kernel exists stay unknown. One process for each group of cases.
"""
from collections import Counter

import pytest
from ascend.dry_run import FUSION, Report, behind, dry_run
from ascend.stand_ins import build, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))
STRAIGHT = "whole_float32", "whole_float16", "whole_bfloat16", "clipped", "token_weights", "loss_scaler"
MORE = ("pieces", "alone", "skip_window", "skip_microbatch", "amp_level", "noise_scale", "several_losses", "grad_cache")
BRANCHED = "by_hand", "cell"
CONTROL_FLOW = {"ConditionSwitch", "ConditionGather", "Switch", "SwitchLayer", "Partial", "call", "PyExecute"}


@pytest.fixture(scope="session")
def cann(tmp_path_factory):
    return build(tmp_path_factory.mktemp("stand_ins"))


def graphs_of(report):
    assert isinstance(report, Report), report
    return [Counter(node.name for node in graph) for graph in report.graphs]


def parameter(node):
    """Return the Parameter that a node stands for, or "" for what an operator computed."""
    found = behind(node)
    return found if isinstance(found, str) else ""


def weight_gradients(report, layers=3):
    """The operators between the MatMul of a weight's gradient and the addition into its buffer, for each weight."""
    found = []
    for graph in report.graphs:
        for node in graph:
            if node.name == "AssignAdd" and "layers" in parameter(node.inputs[0]) and ".weight" in parameter(node.inputs[0]):
                found.append([])
                node = behind(node.inputs[1])
                while node.name != "MatMul":
                    found[-1].append(node.name)
                    node = behind(node.inputs[0])
    assert not found or len(found) % layers == 0
    return found


def require_straight(reports, names):
    for name in names:
        graphs = graphs_of(reports[name])
        assert len(graphs) >= 2, name
        assert not any(CONTROL_FLOW & set(graph) for graph in graphs), name


@pytest.mark.slow
def test_more_train_steps_compile_without_control_flow(cann, tmp_path):
    require_straight(dry_run(cann, tmp_path, MORE), MORE)


def test_every_graph_of_a_train_step_compiles_without_control_flow(cann, tmp_path):
    reports = dry_run(cann, tmp_path, (*STRAIGHT, *BRANCHED, "op_by_op"))
    require_straight(reports, STRAIGHT)
    # Negative control: what decides on the device has a branch, in the same words.
    for name in BRANCHED:
        assert any(CONTROL_FLOW & set(graph) for graph in graphs_of(reports[name])), name
    assert isinstance(reports["op_by_op"], Report), reports["op_by_op"]
    # Nothing but a cast between a product and its buffer; a weight that is a Tensor needs a multiplication.
    assert weight_gradients(reports["whole_float32"]) == [[]] * 3
    assert weight_gradients(reports["whole_bfloat16"]) == weight_gradients(reports["whole_float16"]) == [["Cast"]] * 3
    weighed = weight_gradients(reports["token_weights"])
    assert len(weighed) == 3
    assert all("MulNoNan" in between for between in weighed)
    # Each buffer is multiplied after the norm is known, and emptied, in place; without a copy.
    for name in ("whole_float32", "clipped"):
        update = graphs_of(reports[name])[1]
        assert update["InplaceMul"] == update["InplaceZero"] == 6
        assert update["TensorMove"] == update["MulNoNan"] == 0
    assert graphs_of(reports["clipped"])[1]["Square"] == 12  # the norm, and that of tiny gradients
    assert graphs_of(reports["loss_scaler"])[1]["InplaceMul"] == 0  # divided, they are copies


def test_the_update_reads_the_buffers_in_the_right_order(cann, tmp_path):
    """The mark of a side effect orders nothing here: what is read before a multiplication in place has to be an input of its factor."""
    report = dry_run(cann, tmp_path, ["clipped"])["clipped"]
    assert isinstance(report, Report), report
    graph = report.graphs[1]
    multiplied = [node for node in graph if node.name == "InplaceMul"]
    squares = {id(node) for node in graph if node.name == "Square"}
    for node in multiplied:
        assert squares <= {id(before) for before in all_before(node.inputs[1])}
    # The optimizer takes what the multiplication returned, not the buffer.
    buffers = {parameter(node.inputs[0]) for node in multiplied}
    assert len(buffers) == 6
    assert all("accumulator" in name for name in buffers)
    readers = {node.name for node in graph for given in node.inputs if parameter(given) in buffers}
    assert readers <= {"Load", "Depend", "UpdateState", "MakeTuple", "Square", "Muls", "InplaceMul", "InplaceZero"}


def all_before(node, seen=None):
    """All nodes that a node waits for."""
    seen = {} if seen is None else seen
    if not isinstance(node, str) and id(node) not in seen:
        seen[id(node)] = node
        for given in node.inputs:
            all_before(given, seen)
    return list(seen.values())


def test_weight_gradients_are_added_by_the_matrix_product_itself(cann, tmp_path):
    """With MindSpore's pass on: one InplaceMatmulAdd for each Dense weight in 16 bits, and no gradient. Not in float32: the control."""
    reports = dry_run(cann, tmp_path, ("whole_bfloat16", "whole_float16", "pieces", "whole_float32"), flags=FUSION)
    fused = {name: [graph["InplaceMatmulAdd"] for graph in graphs_of(report)] for name, report in reports.items()}
    assert fused["whole_bfloat16"] == fused["whole_float16"] == [3, 0]
    assert sorted(fused["pieces"]) == [0, 0, 0, 3]  # 6, 6 and 4 rows: the shorter last piece needs a multiplication
    assert fused["whole_float32"] == [0, 0]


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_the_exchange_of_ranks_compiles(cann, tmp_path, ranks):
    reports = dry_run(cann, tmp_path, ("ranks_window", "ranks_microbatch", "ranks_shard"), ranks=ranks)
    add, update = graphs_of(reports["ranks_window"])[:2]
    assert add["AllReduce"] == 0
    assert update["AllReduce"] == 1
    assert graphs_of(reports["ranks_microbatch"])[0]["AllReduce"] == 1
    add, update = graphs_of(reports["ranks_shard"])[:2]
    assert add["ReduceScatter"] == update["AllGather"] == 1


# Bytes per parameter at the peak: what is held, and little more. In bfloat16 2 + 4, and 4 of the optimizer; in float32 4 + 4, and 4 or 8.
LIMITS = {
    "memory_forward": {"add": 6.6, "update": 14.1}, "memory_backwards": {"add": 6.6}, "memory_groups": {"add": 6.6, "update": 14.1},
    "memory_decayed_clipped": {"update": 14.5}, "memory_momentum": {"add": 8.6, "update": 12.1},
    "memory_momentum_clipped": {"update": 13.0}, "memory_adam": {"update": 16.1}, "memory_adam_clipped": {"update": 17.0},
    "memory_by_hand": {"update": 13.1}}


FAST = "memory_groups", "memory_momentum_clipped"


@pytest.mark.parametrize("names", [FAST, pytest.param(tuple(LIMITS), marks=pytest.mark.slow)], ids=["fast", "all"])
def test_gradients_and_copies_do_not_coexist(cann, tmp_path, names):
    controls = "memory_of_copies", "memory_of_additions_in_turn"
    reports = dry_run(cann, tmp_path, (*names, *controls))
    for name in names:
        limits = LIMITS[name]
        assert isinstance(reports[name], Report), reports[name]
        for what, limit in limits.items():
            assert reports[name].numbers[what] <= limit, (name, what)
    # Negative controls: the same figures say so if a copy of all buffers is made, or all gradients wait.
    copies, waiting = (reports[name].numbers for name in controls)
    assert copies["update"] > 15.9
    assert waiting["add"] > 10.0


def test_a_case_that_does_not_compile_is_an_error(cann, tmp_path):
    """Negative control: nn.SGD takes no bfloat16."""
    reports = dry_run(cann, tmp_path, ["sgd_in_bfloat16"])
    assert "SGD" in reports["sgd_in_bfloat16"]
