"""Every graph compiled by MindSpore's Ascend backend in a dry run, and its memory in bytes.

No kernel is launched: values, speed, and whether a kernel exists stay unknown.
"""
from collections import Counter
from typing import NamedTuple

import pytest
from support.ascend.cases import LAYERS
from support.ascend.dry_run import Node, Report, behind, dry_run
from support.ascend.stand_ins import built_once, locked, missing, shared_folder

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))
CONTROL_FLOW = {"ConditionSwitch", "ConditionGather", "Switch", "SwitchLayer", "Partial", "call", "PyExecute"}
DENSE = ".weight"
EVERYBODY = "hccl_world_group"
INSIDE, ACROSS = "ms_accum.0.2.1", "ms_accum.0.4.2"  # of rank 0: its node, and its counterparts


class Expected(NamedTuple):
    """What a case is compiled to. What is None is not looked at."""

    branch: bool | None = False  # whether any of its graphs has control flow; None also for what compiles none itself
    between: list | None = None  # for each weight, the operators between its gradient's MatMul and the addition
    weights: str | tuple = DENSE  # how the names of these weights end
    fused: list | None = None  # how many InplaceMatmulAdd each graph has
    exchange: list | None = None  # collectives of the graph that adds and of the one that updates, each with its group
    most: dict | None = None  # bytes per parameter at the peak, or MiB
    least: dict | None = None


def held(**most):
    return Expected(branch=None, most=most)


def above(least):
    return Expected(branch=None, least={"add": least})


def exchange(*graphs):
    """What ranks exchange in the graphs. The sums of numbers travel with the first bucket."""
    return Expected(branch=None, exchange=list(graphs))


class Process(NamedTuple):
    """The cases that a process compiles, whether with MindSpore's pass that fuses additions, and for how many ranks.

    `in_place`: whether the environment chooses the kernels in place, for figures of the update that depend on them.
    """

    cases: dict
    fusion: bool = False
    ranks: int = 1
    in_place: bool = False


PLAIN, BRANCHED = Expected(), Expected(branch=True)
# Without and with the pass; without it, nothing is fused: a negative control.
CAST, FUSED = Expected(between=[["Cast"]] * LAYERS, fused=[0, 0]), Expected(fused=[LAYERS, 0])
RANKS = {
    "window": exchange([], [("AllReduce", EVERYBODY)]), "microbatch": exchange([("AllReduce", EVERYBODY)], []),
    "zero1": exchange([], [("ReduceScatter", EVERYBODY), ("AllGather", EVERYBODY)]),
    "zero2": exchange([("ReduceScatter", EVERYBODY)], [("AllGather", EVERYBODY)])}
# The norm, and whether slices are finite, are sums over ranks. The whole parameters are not in these figures: rank 0's
# values have brought them to the device before.
SUMS, SCATTERED = [("AllReduce", EVERYBODY)] * 2, [("ReduceScatter", EVERYBODY)]
CLIPPED = {
    "zero1_clipped": exchange([], [*SCATTERED, *SUMS, ("AllGather", EVERYBODY)]),
    "zero2_clipped": exchange(SCATTERED, [*SUMS, ("AllGather", EVERYBODY)]),
    "memory_zero0": held(add=4.6, update=16.7), "memory_zero1": held(add=4.6, update=9.4),
    "memory_zero2_relu": held(add=1.4, update=3.1), "memory_microbatch": held(add=4.9),
    # Negative control: the backward pass runs ahead of the exchange.
    "memory_zero2_relu_unordered": above(4), "memory_microbatch_unordered": above(8)}
PROCESSES = {
    "fast": Process({
        # The pass is for 16 bits.
        "float32": Expected(between=[[]] * LAYERS, fused=[0, 0]), "clipped": FUSED, "clipped_float32": PLAIN,
        "verdict": BRANCHED,
        "zero1": RANKS["zero1"]}, fusion=True, ranks=2, in_place=True),
    "two ranks": Process({
        # Negative control: if all gradients wait, or a copy of all buffers is made, the figures say so.
        "copies": Expected(branch=None, least={"add": 11.5, "update": 15.9}),
        "bfloat16": FUSED, "sgd_in_bfloat16": Expected(branch=None), "zero2": RANKS["zero2"],
        # A mean needs one multiplication for each gradient, a sum none.
        "token_means": Expected(between=[["MulNoNan", "Cast"]] * LAYERS, fused=[0, 0]), "token_sums": FUSED,
        "memory_token_sums": held(add=6.2), "cell": FUSED,
        "op_by_op": Expected(branch=None), "momentum_groups": held(add=8.6, update=12.1)},
        fusion=True, ranks=2, in_place=True),
    "more": Process({
        "float16": CAST, "bfloat16": CAST, "any_length": CAST,
        "any_rows": Expected(between=[["MulNoNan", "Cast"]] * LAYERS),  # what it weighs is not known before
        **{f"amp_{level}": CAST for level in ("O1", "O2", "O3", "auto")},
        **dict.fromkeys(("pieces", "alone", "noise_scale", "grad_cache"), PLAIN),
        **dict.fromkeys(("loss_scaler", "skip_window", "skip_microbatch", "by_hand", "sink"), BRANCHED)}),
    # In pieces of 6, 6 and 4 rows, the shorter last one needs a multiplication.
    "more fused": Process({"float16": FUSED, "pieces": Expected(fused=[LAYERS, 0, 0]),
                           "any_length": FUSED, "any_rows": Expected(fused=[0, 0]),
                           "token_sums_in_pieces": Expected(fused=[LAYERS, LAYERS, 0])}, fusion=True),
    "language model": Process({
        "language_model": Expected(
            between=[["MulNoNan"]] * 5, weights=("hidden.weight", "out.weight", "head.weight")),  # it counts bytes
        "memory_language_model": held(add=10.8), "memory_language_model_means": held(add=11.3),
        "memory_language_model_sums": held(add=10.8)}),
    "MindCV": Process({
        **{name: Expected(between=[between] * 5, weights=(
            "qkv.weight", "attn.proj.weight", "fc1.weight", "fc2.weight", "head.weight"))
           for name, between in (("vit", []), ("vit_O2", ["Cast"]))},
        "resnet18": Expected(between=[[]], weights="classifier.weight")}),
    "8 ranks": Process({**RANKS, **CLIPPED}, ranks=8),
    "2 nodes": Process({
        "node": exchange([("AllReduce", INSIDE)], [("AllReduce", ACROSS), ("AllGather", INSIDE)]),
        "node_zero2": exchange([("ReduceScatter", INSIDE)], [("ReduceScatter", ACROSS), ("AllGather", EVERYBODY)])},
        ranks=4),
    # What is held, and little more. In bfloat16 2 + 4, and 4 of the optimizer; in float32 4 + 4, and 4 or 8.
    "memory": Process({
        "memory": held(add=6.6, update=12.6), "memory_backwards": Expected(branch=None, least={"add": 10}),
        "memory_groups": held(add=6.6, update=14.1), "memory_clipped": held(update=14.5),
        **dict.fromkeys(("memory_token_means", "memory_token_means_in_pieces"), held(add=6.8, update=14.1)),
        **dict.fromkeys(("memory_token_sums", "memory_token_sums_in_pieces"), held(add=6.6, update=14.1)),
        "memory_token_means_in_groups": held(add=6.8, update=14.5),
        "memory_token_sums_in_groups": held(add=6.6, update=14.5),
        "memory_in_16_bits": held(add=4.6), "momentum": held(add=8.6, update=12.1),
        "momentum_groups": held(add=8.6, update=12.1), "momentum_clipped": held(update=13.0),
        "adam": held(update=16.1), "adam_clipped": held(update=17.0), "memory_by_hand": held(update=13.1)},
        in_place=True),
    # MiB above what is held. Without recomputation, and with chunks that nothing orders, it is much more. PyNative runs
    # chunks in order by itself.
    "recomputed": Process({
        "head": above(160), "head_in_chunks_at_once": above(160), "head_in_chunks": held(add=30),
        "head_in_pieces": held(add=25), "head_in_chunks_op_by_op": held(add=36),
        **{f"blocks_{name}": above(280) for name in ("step", "step_lazy", "cell", "jit", "op_by_op")},
        **{f"blocks_{name}_recomputed": held(add=67) for name in ("step", "cell", "jit")},
        **{f"blocks_{name}_lazy_recomputed": held(add=61) for name in ("step", "cell", "jit")},
        "blocks_op_by_op_recomputed": held(add=120),
        "blocks_pieces": held(add=37), "blocks_pieces_lazy": held(add=52), "blocks_pieces_recomputed": held(add=9),
        "blocks_pieces_lazy_recomputed": held(add=10)}),
    **{dtype: Process({f"optimizers_{dtype}": Expected(branch=None)}) for dtype in ("float32", "float16", "bfloat16")},
}


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Return `name -> reports` of a process, which runs once for all tests and workers."""
    folder, cann = shared_folder(tmp_path_factory), built_once(tmp_path_factory)

    def reports(name):
        with locked(folder / f"{name}.lock"):
            return dry_run(cann, folder / name, *PROCESSES[name])

    return reports


@pytest.mark.parametrize("process", [
    "fast", *map(slow, ("two ranks", "more", "more fused", "language model", "MindCV", "8 ranks", "2 nodes", "memory",
                       "recomputed"))])
def test_graphs_and_memory_are_what_is_expected(compiled, process):
    if process == "MindCV":
        pytest.importorskip("mindcv", reason="needs MindCV: pip install '.[test]'")
    reports = compiled(process)
    assert "SGD" in reports.pop("sgd_in_bfloat16", "SGD")  # negative control: a case that does not compile is an error
    wrong = {name: list(differences(report, PROCESSES[process].cases[name])) for name, report in reports.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def differences(report, expected):
    """Yield what of a report is not as expected."""
    if not isinstance(report, Report):
        yield report
        return
    graphs = [Counter(node.name for node in graph) for graph in report.graphs]
    if expected.branch is not None:
        if any(CONTROL_FLOW & set(graph) for graph in graphs) != expected.branch:
            yield "control flow"
        if len(graphs) < 2 and not expected.branch:
            yield f"{len(graphs)} graphs"
    exchanged = [[(node.name, node.group) for node in graph if node.group]
                 for graph in report.graphs[:len(expected.exchange or ())]]
    for wanted, found in (
            (expected.between, lambda: weight_gradients(report, expected.weights)),
            (expected.fused, lambda: [graph["InplaceMatmulAdd"] for graph in graphs]),
            (expected.exchange, lambda: exchanged)):
        if wanted is not None and found() != wanted:
            yield found()
    numbers = report.numbers
    yield from ((what, numbers[what]) for what, most in (expected.most or {}).items() if numbers[what] > most)
    yield from ((what, numbers[what]) for what, least in (expected.least or {}).items() if numbers[what] <= least)


def weight_gradients(report, ends):
    """For each such weight, the operators between its gradient's MatMul and the addition into its buffer."""
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


def parameter(node):
    """Return the Parameter that a node stands for, or "" for what an operator computed."""
    found = behind(node)
    return found if isinstance(found, str) else ""


# --- what compares cases with each other ------------------------------------------------------------------------------


def test_buffers_are_multiplied_and_emptied_in_place(compiled):
    for name in ("float32", "clipped_float32"):
        update = Counter(node.name for node in compiled("fast")[name].graphs[1])
        assert moved(compiled("fast")[name].graphs[1]) == set()
        assert update["InplaceMul"] == update["InplaceZero"] == 2 * LAYERS
        assert update["MulNoNan"] == 0
    assert len(squares_of(compiled("fast")["clipped_float32"].graphs[1])) == 2 * LAYERS  # each gradient is read once


@pytest.mark.slow
def test_copies_of_the_buffers_are_seen(compiled):
    """Negative control."""
    assert Counter(node.name for node in compiled("two ranks")["copies"].graphs[1])["InplaceMul"] == 0


def test_the_update_reads_the_buffers_in_the_right_order(compiled):
    """The mark of a side effect orders nothing here: what reads a buffer first has to be an input of its factor."""
    plain, graph = (compiled("fast")[name].graphs[1] for name in ("float32", "clipped_float32"))
    multiplied = [node for node in graph if node.name == "InplaceMul"]
    squares = {id(node) for node in squares_of(graph)}
    assert squares
    for node in multiplied:
        assert squares <= {id(before) for before in all_before(node.inputs[1])}
    # Negative control: where nothing is clipped, no factor waits for a norm.
    factors = [node.inputs[1] for node in plain if node.name == "InplaceMul"]
    assert not any(squares_of(all_before(factor)) for factor in factors)
    # The optimizer takes what the multiplication returned, not the buffer.
    buffers = {parameter(node.inputs[0]) for node in multiplied}
    assert len(buffers) == 2 * LAYERS
    assert all("accumulator" in name for name in buffers)
    readers = {node.name for node in graph for given in node.inputs if parameter(given) in buffers}
    assert readers <= {"Load", "Depend", "UpdateState", "MakeTuple", "Mul", "InplaceMul", "InplaceZero"}


def squares_of(graph):
    """The nodes that multiply something with itself."""
    return [node for node in graph if node.name == "Mul" and node.inputs[0] is node.inputs[1]]


def all_before(node, seen=None):
    """All nodes that a node waits for."""
    seen = {} if seen is None else seen
    if not isinstance(node, str) and id(node) not in seen:
        seen[id(node)] = node
        for given in node.inputs:
            all_before(given, seen)
    return list(seen.values())


@pytest.mark.parametrize(("process", "names"), [
    ("fast", ("verdict",)), pytest.param("more", ("loss_scaler", "skip_window", "skip_microbatch"),
                                         marks=pytest.mark.slow)])
def test_a_close_with_a_verdict_is_one_graph_that_moves_no_buffer(compiled, process, names):
    for name in names:
        _, close = compiled(process)[name].graphs
        found = Counter(node.name for node in close)
        assert (found["ConditionSwitch"], found["PyExecute"]) == (1, 0)
        assert sum(found[k] for k in ("ApplyMomentum", "AdamWeightDecay", "AdamApplyOneWithDecay")) == 2 * LAYERS
        assert moved(close) <= {"zero"}  # a single number
    assert moved([Node("TensorMove", ["%para3_accumulator7.fc.weight"], "")]) == {"fc.weight"}  # control


def moved(graph):
    """The names of Parameters of an accumulator that a graph copies."""
    names = [parameter(node.inputs[0]) for node in graph if node.name == "TensorMove"]
    return {name.partition("accumulator")[2].partition(".")[2] for name in names}


@pytest.mark.slow
def test_in_sink_mode_the_graph_reads_the_batch_itself(compiled):
    for process, name, wanted in (("more", "sink", [1]), ("two ranks", "cell", [0, 0])):  # a cell's update is a graph
        assert [Counter(node.name for node in graph)["GetNext"] for graph in compiled(process)[name].graphs] == wanted


# MindSpore's optimizers that do not compile for Ascend. The guide says how many.
NOT_COMPILED = {
    "float32": "",
    "float16": "nn.LARS nn.AdamOffload nn.FTRL experimental.optim.Rprop",
    "bfloat16": """
        nn.Momentum nn.LARS nn.Adam nn.LazyAdam nn.AdamOffload nn.Lamb nn.SGD nn.FTRL nn.RMSProp nn.ProximalAdagrad
        nn.Adagrad nn.AdaMax nn.Adadelta experimental.optim.SGD experimental.optim.Adam experimental.optim.Adadelta
        experimental.optim.Adagrad experimental.optim.Rprop"""}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NOT_COMPILED)
def test_these_optimizers_do_not_compile_for_ascend(compiled, dtype):
    (report,) = compiled(dtype).values()
    assert isinstance(report, Report), report
    assert set(report.numbers["failed"]) == set(NOT_COMPILED[dtype].split())
    assert not any(report.numbers["failed"].values())  # nor without ms_accum
    assert len(report.numbers["compiled"]) > 10
