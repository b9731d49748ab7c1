"""The graphs of a train step, read as MindSpore compiled them: no control flow, and a cast at most before a buffer."""
import os
import re
from contextlib import suppress
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from support.modes import compiled_graphs
from support.training import LOSS, sgd

from ms_accum import Accumulator, make_grad_cache_step, make_train_step, until_weight
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.core import boundary as compiling
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors


def with_two(network):
    """A loss with an aux."""
    def forward_fn(x, y):
        return LOSS(network(x), y), ops.square(network(x)).mean()

    return forward_fn


def counted(x, y):
    return (y >= 0).sum()


def contrast(z):
    return ops.cross_entropy(z @ z.T, ops.arange(len(z)))


def cached(network, optimizer):
    def encode(x, y):
        return network(x)

    return make_grad_cache_step(encode, contrast, optimizer, 2, pieces=4)


def step_of(forward_of, accumulate_step, **options):
    return lambda network, optimizer: make_train_step(forward_of(network), optimizer, accumulate_step, **options)


# How a step is built, and the functions (or the classes of what is called) that became graphs.
JUDGED = step_of(with_two, 2, has_aux=True, pieces=4, weight_fn=counted, on_nonfinite="skip_window",
                 loss_scaler=amp.DynamicLossScaler(2.0**8, 2, 2))
WHOLE = step_of(mean_loss, {0: 1, 1: 2}, clip_norm=1.0)
SKIPPED = step_of(mean_loss, {0: 1, 1: 2}, on_nonfinite="skip_microbatch")
BUDGET = step_of(mean_loss, until_weight(12), weight_fn=counted, stages=(GradientNoiseScale(),))
FAST = [(WHOLE, {"add", "update", "close_with_update"})]
OTHERS = [(JUDGED, {"Piece", "End", "counts_and_verdict", "close_with_update", "close_without_update"}),
          (cached, {"encode", "first", "backward", "end_and_count", "close_with_update"}),
          (SKIPPED, {"add", "close_with_update"}), (BUDGET, {"add", "close_with_update"})]


def save_graphs():
    """Let MindSpore write its graphs. It reads this with the first graph of a process."""
    os.environ.update(MS_DEV_SAVE_GRAPHS="1", MS_DEV_DUMP_IR_PASSES="validate",
                      MS_DEV_SAVE_GRAPHS_PATH=str(Path("ir").absolute()))


def graphs_of(run):
    """The text of each graph that is compiled meanwhile."""
    seen = set(Path("ir").glob("*_validate_*.ir"))
    run()
    return [file.read_text(encoding="utf-8") for file in sorted(set(Path("ir").glob("*_validate_*.ir")) - seen)]


def trained(build, nan=1.0, count=5):
    """What trains on some microbatches, the third of which is multiplied, and flushes."""
    def run():
        network = MLP()
        train_step = build(network, nn.Momentum(network.trainable_params(), 0.1, 0.9))
        data = batches([6] * count)
        data[2 % count][0][:] *= nan
        for _ in train_step.epoch([tensors(x, y) for x, y in data]):
            pass
        assert int(train_step.accumulator.update_step) >= 2 * (count == 5)

    return run


def by_hand():
    network = MLP()
    acc = Accumulator(sgd(network), 2, reduction="sum")

    @ms.jit
    def step(*gradients):
        return acc(gradients)

    step(*[Tensor(p.asnumpy()) for p in network.trainable_params()])


def control_flow(graph):
    """What a straight graph may not hold: branches, calls, and what MindSpore hands to Python at run time."""
    pattern = r"= (?:PrimFunc_)?(Switch|Partial|Call|SwitchLayer|PyExecute)\(|= %\d+\((?=\[CNode\])"
    return set(re.findall(pattern, graph))


@pytest.mark.slow
@pytest.mark.fresh_process("jit")
@pytest.mark.parametrize(("mode", "steps"), [("jit", FAST), ("jit", OTHERS)], ids=["jit-fast", "jit-others"])
def test_the_graphs_of_a_train_step_hold_no_control_flow(mode, steps, monkeypatch):
    """Without the branch that CPU gets. Controls: a graph by hand has a Switch, and so has a step with that branch."""
    save_graphs()
    made, init = [], compiling.Graph.__init__

    def noted(self, function):
        made.append(getattr(function, "__name__", type(function).__name__))
        init(self, function)

    monkeypatch.setattr(compiling.Graph, "__init__", noted)
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "needs_branch", lambda: False)
        for build, functions in steps:
            made.clear()
            before = compiled_graphs()
            graphs = graphs_of(trained(build, np.nan if "close_without_update" in functions else 1.0))
            assert functions <= set(made)
            assert len(graphs) == compiled_graphs() - before >= len(functions)
            assert not any(map(control_flow, graphs)), functions
    for control in (trained(SKIPPED, count=1), by_hand):
        assert any("Switch" in control_flow(graph) for graph in graphs_of(control))


@pytest.mark.slow
@pytest.mark.fresh_process("jit")
@pytest.mark.parametrize("mode", ["jit"])
def test_a_gradient_is_added_to_its_buffer_as_it_is_but_for_a_cast(mode):
    """Which Ascend's `matmul_assignadd_fusion` looks for. Control: another size of microbatch is multiplied."""
    save_graphs()
    chains = [chain for graph in graphs_of(added_in_three_dtypes) if (chain := before_each_buffer(graph))]
    assert chains == [[each, each] for each in ([], ["Mul"], ["Cast"], ["Cast"])]


def added_in_three_dtypes():
    for dtype, sizes in ((ms.float32, (6, 4)), (ms.float16, (6,)), (ms.bfloat16, (6,))):
        network = MLP().to_float(dtype)
        train_step = make_train_step(mean_loss(network), sgd(network), 4)
        with suppress(*([RuntimeError, TypeError] if dtype == ms.bfloat16 else [])):  # no kernels on CPU, but a graph
            for x, y in batches(sizes):
                train_step(*tensors(x, y))


def before_each_buffer(graph):
    """The names of the nodes between a MatMul and the AssignAdd into the buffer of a weight, for each of these."""
    nodes = {number: (name, arguments.split(", ")) for number, name, arguments in re.findall(
        r"^\s*(%\d+)\(.*?\) = (?:PrimFunc_)?(\w+)\(([^)]*)", graph, re.MULTILINE)}
    found = []
    for name, arguments in nodes.values():
        buffer = nodes.get(arguments[0], (None, [arguments[0]]))[1][0]  # without a mark, it is read through a Load
        if name == "AssignAdd" and re.fullmatch(r"%para\d+_accumulator.*\.sum\.(first|second)\.weight", buffer):
            found.append([])
            gradient = arguments[1]
            while nodes[gradient][0] != "MatMul":
                found[-1].append(nodes[gradient][0])
                gradient = nodes[gradient][1][0]
    return found
