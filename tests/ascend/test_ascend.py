"""Every graph compiled by MindSpore's Ascend backend in a dry run, and its memory in bytes.

No kernel is launched: values, speed, and whether a kernel exists stay unknown.
"""
import re
from collections import Counter
from pathlib import Path

import pytest
from ascend.cases import LAYERS
from ascend.dry_run import FUSION, Report, Run, behind, dry_run
from ascend.stand_ins import built_once, locked, missing, shared_folder

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))
PAGE = Path(__file__).parents[2] / "tutorials" / "guide" / "accelerators.md"
CONTROL_FLOW = {"ConditionSwitch", "ConditionGather", "Switch", "SwitchLayer", "Partial", "call", "PyExecute"}
# Bytes per parameter at the peak: what is held, and little more. In bfloat16 2 + 4, and 4 of the optimizer; in float32 4 + 4, and 4 or 8.
LIMITS = {
    "memory:momentum_groups": {"add": 8.6, "update": 12.1}, "memory:momentum": {"add": 8.6, "update": 12.1},
    "memory:momentum_clipped": {"update": 13.0}, "memory:adam": {"update": 16.1}, "memory:adam_clipped": {"update": 17.0},
    "memory_by_hand": {"update": 13.1}, "memory:forward": {"add": 6.6, "update": 14.1}, "memory:backwards": {"add": 6.6},
    "memory:in_16_bits": {"add": 4.6},
    "memory:groups": {"add": 6.6, "update": 14.1}, "memory:decayed_clipped": {"update": 14.5}}
EXCHANGES = "exchange:window", "exchange:microbatch", "exchange_shards:microbatch"
DTYPES = "float32", "float16", "bfloat16"
# One process for each. What has a branch stands among the others: without it, nothing would show that a branch is found.
RUNS = {
    "fast": Run(("whole:float32", "whole:bfloat16", "trained:clipped", "token_weights", "cell", "op_by_op", "memory:momentum_groups",
                 "memory_of_copies", "sgd_in_bfloat16")),
    "fused": Run(("whole:bfloat16", *EXCHANGES[::2]), FUSION, ranks=2),  # which is for 16 bits alone, and the exchanges are of float32
    "more": Run(("whole:float16", "trained:loss_scaler", "trained:pieces", "trained:alone", "trained:skip_window",
                 "trained:skip_microbatch", "trained:noise_scale", "several_losses",
                 "grad_cache", "amp_level:O1", "amp_level:O2", "amp_level:O3", "amp_level:auto", "by_hand", "sink")),
    "more fused": Run(("whole:float16", "trained:pieces", "whole:float32"), FUSION),
    "language model": Run(("language_model",)),
    "MindCV": Run(("vit", "vit:O2", "resnet18")),
    "8 ranks": Run(EXCHANGES, ranks=8),
    "2 nodes": Run(("nodes_of:2", "nodes_of_shards:2"), ranks=4),
    "memory": Run(tuple(LIMITS)),
    "batch": Run(("batch_of_8192", "batch_of_8192:1", "batch_of_8192:2", "batch_of_8192:8")),
    **{dtype: Run((f"optimizers:{dtype}",)) for dtype in DTYPES},
}
BRANCHED = {"by_hand", "cell", "sink"}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Return `name -> reports` of a process in RUNS, which runs once for all tests and workers."""
    folder, cann = shared_folder(tmp_path_factory), built_once(tmp_path_factory)

    def reports(name):
        with locked(folder / f"{name}.lock"):
            return dry_run(cann, folder / name, RUNS[name])

    return reports


def graphs_of(report):
    assert isinstance(report, Report), report
    return [Counter(node.name for node in graph) for graph in report.graphs]


def parameter(node):
    """Return the Parameter that a node stands for, or "" for what an operator computed."""
    found = behind(node)
    return found if isinstance(found, str) else ""


def weight_gradients(report, ends=".weight"):
    """The operators between the MatMul of a weight's gradient and the addition into its buffer, for each weight with such a name."""
    found = []
    for graph in report.graphs:
        for node in graph:
            if node.name == "AssignAdd" and parameter(node.inputs[0]).endswith(ends):
                found.append([])
                node = behind(node.inputs[1])
                while node.name != "MatMul":
                    assert len(found[-1]) < 9, f"no MatMul before {parameter(node.inputs[0])}: {found[-1]}"
                    found[-1].append(node.name)
                    node = behind(node.inputs[0])
    return found


@pytest.mark.parametrize("run", ["fast", slow("more"), slow("language model"), slow("MindCV")])
def test_train_steps_compile_without_control_flow(compiled, run):
    if run == "MindCV":
        pytest.importorskip("mindcv", reason="needs MindCV: pip install '.[ecosystem]'")
    names = [name for name in RUNS[run].cases if not name.startswith(("memory", "op_by_op", "sgd"))]
    reports = compiled(run)
    for name in names:
        graphs = graphs_of(reports[name])
        # Negative control: what decides on the device has a branch, in the same words.
        assert any(CONTROL_FLOW & set(graph) for graph in graphs) == (name in BRANCHED), name
        assert len(graphs) >= 2 or name in BRANCHED, name


def test_between_a_weight_gradient_and_its_buffer_is_nothing_but_a_cast(compiled):
    reports = compiled("fast")
    assert weight_gradients(reports["whole:float32"]) == [[]] * LAYERS
    assert weight_gradients(reports["whole:bfloat16"]) == [["Cast"]] * LAYERS
    # Negative control: a weight that is a Tensor needs a multiplication.
    weighed = weight_gradients(reports["token_weights"])
    assert len(weighed) == LAYERS
    assert all("MulNoNan" in between for between in weighed)


@pytest.mark.slow
def test_so_it_is_in_mixed_precision_and_in_networks(compiled):
    more = compiled("more")
    for name in ("whole:float16", "amp_level:O1", "amp_level:O2", "amp_level:O3", "amp_level:auto"):
        assert weight_gradients(more[name]) == [["Cast"]] * LAYERS, name
    weights = "hidden.weight", "out.weight", "head.weight"
    assert weight_gradients(compiled("language model")["language_model"], weights) == [["MulNoNan"]] * 5  # it counts bytes
    pytest.importorskip("mindcv", reason="needs MindCV: pip install '.[ecosystem]'")
    networks, weights = compiled("MindCV"), ("qkv.weight", "attn.proj.weight", "fc1.weight", "fc2.weight", "head.weight")
    assert weight_gradients(networks["vit"], weights) == [[]] * 5
    assert weight_gradients(networks["vit:O2"], weights) == [["Cast"]] * 5
    assert weight_gradients(networks["resnet18"], "classifier.weight") == [[]]


def test_buffers_are_multiplied_and_emptied_in_place(compiled):
    reports = compiled("fast")
    assert isinstance(reports["op_by_op"], Report), reports["op_by_op"]
    for name in ("whole:float32", "trained:clipped"):
        update = graphs_of(reports[name])[1]
        assert update["InplaceMul"] == update["InplaceZero"] == 2 * LAYERS
        assert update["TensorMove"] == update["MulNoNan"] == 0
    assert graphs_of(reports["trained:clipped"])[1]["Square"] == 4 * LAYERS  # the norm, and that of tiny gradients
    # Negative control: in the memory's, they are copies.
    assert graphs_of(reports["memory_of_copies"])[1]["InplaceMul"] == 0


def test_the_update_reads_the_buffers_in_the_right_order(compiled):
    """The mark of a side effect orders nothing here: what is read before a multiplication in place has to be an input of its factor."""
    graph = compiled("fast")["trained:clipped"].graphs[1]
    multiplied = [node for node in graph if node.name == "InplaceMul"]
    squares = {id(node) for node in graph if node.name == "Square"}
    for node in multiplied:
        assert squares <= {id(before) for before in all_before(node.inputs[1])}
    # Negative control: where nothing is clipped, no factor waits for a norm.
    plain = [node for node in compiled("fast")["whole:float32"].graphs[1] if node.name == "InplaceMul"]
    assert not any(before.name == "Square" for node in plain for before in all_before(node.inputs[1]))
    # The optimizer takes what the multiplication returned, not the buffer.
    buffers = {parameter(node.inputs[0]) for node in multiplied}
    assert len(buffers) == 2 * LAYERS
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


@pytest.mark.parametrize(("run", "ranks"), [("fused", 2), slow("8 ranks", 8)])
def test_the_exchange_of_ranks_compiles(compiled, run, ranks):
    window, *microbatch, shards = (collectives(report) for name, report in compiled(run).items() if name in EXCHANGES)
    everybody = "hccl_world_group"
    assert window == [[], [("AllReduce", everybody)]]
    assert [added for added, _ in microbatch] == [[("AllReduce", everybody)]] * (ranks == 8)
    assert ("ReduceScatter", everybody) in shards[0]
    assert ("AllGather", everybody) in shards[1]


@pytest.mark.slow
def test_nodes_exchange_microbatches_inside_and_windows_across(compiled):
    inside, across = "ms_accum.0.2.1", "ms_accum.0.4.2"  # of rank 0: its node, and its counterparts
    whole, shards = (collectives(report) for report in compiled("2 nodes").values())
    assert whole == [[("AllReduce", inside)], [("AllReduce", across)] * 2 + [("AllGather", inside)]]
    assert shards == [[("AllReduce", inside), ("ReduceScatter", inside)], [("AllReduce", across)] * 2 + [("AllGather", inside)]]


def collectives(report):
    """The collectives of the graphs that add and update, each with its group."""
    assert isinstance(report, Report), report
    return [[(node.name, node.group) for node in graph if node.group] for graph in report.graphs[:2]]


def fused(report):
    return [graph["InplaceMatmulAdd"] for graph in graphs_of(report)]


def test_weight_gradients_are_added_by_the_matrix_product_itself(compiled):
    """With MindSpore's pass on: one InplaceMatmulAdd for each Dense weight, and no gradient. Negative control: with the pass off."""
    assert fused(compiled("fused")["whole:bfloat16"]) == [LAYERS, 0]
    assert fused(compiled("fast")["whole:bfloat16"]) == [0, 0]


@pytest.mark.slow
def test_in_float16_and_in_pieces_too_but_not_in_float32(compiled):
    reports = compiled("more fused")
    assert fused(reports["whole:float16"]) == [LAYERS, 0]
    assert sorted(fused(reports["trained:pieces"])) == [0, 0, 0, LAYERS]  # 6, 6 and 4 rows: the shorter last piece needs a multiplication
    assert fused(reports["whole:float32"]) == [0, 0]


@pytest.mark.slow
def test_in_sink_mode_the_graph_reads_the_batch_itself(compiled):
    assert [graph["GetNext"] for graph in graphs_of(compiled("more")["sink"])] == [1]
    assert [graph["GetNext"] for graph in graphs_of(compiled("fast")["cell"])] == [0]


@pytest.mark.parametrize("run", ["fast", slow("memory")])
def test_gradients_and_copies_do_not_coexist(compiled, run):
    reports = compiled(run)
    for name in LIMITS.keys() & reports.keys():
        assert isinstance(reports[name], Report), reports[name]
        for what, limit in LIMITS[name].items():
            assert reports[name].numbers[what] <= limit, (name, what)
    # Negative control: the same figures say so if all gradients wait, or a copy of all buffers is made.
    control = compiled("fast")["memory_of_copies"].numbers
    assert control["add"] > 11.5
    assert control["update"] > 15.9


@pytest.mark.slow
def test_a_batch_in_eight_pieces_takes_a_third_of_the_memory(compiled):
    plain, one, two, eight = (report.numbers["peak"] for report in compiled("batch").values())
    assert one <= 1.02 * plain
    assert eight <= 0.37 * min(plain, one)
    assert two > 0.37 * plain  # negative control


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_guide_lists_the_optimizers_that_do_not_compile(compiled, dtype):
    row = re.search(rf"^\| {dtype} \|(.*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)[1]
    report = compiled(dtype)[f"optimizers:{dtype}"]
    assert isinstance(report, Report), report
    assert set(report.numbers["failed"]) == set(re.findall(r"`([\w.]+)`", row))
    assert not any(report.numbers["failed"].values())  # nor without ms_accum
    assert len(report.numbers["compiled"]) > 10


def test_a_case_that_does_not_compile_is_an_error(compiled):
    """Negative control: nn.SGD takes no bfloat16."""
    assert "SGD" in compiled("fast")["sgd_in_bfloat16"]
