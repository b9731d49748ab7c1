"""The graphs of a train step: how many there are, what MindSpore says of them, and what is in them."""
import os
import re
from contextlib import suppress
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from support.modes import compiled_graphs, warned
from support.training import LOSS, sgd, step_of

from ms_accum import Accumulator, make_grad_cache_step, make_train_step
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

DATA = [tensors(x, y) for x, y in batches([6, 6, 6])]


def rows(x, y):
    return (y >= 0).sum()


class Normed(nn.Cell):
    """A network with BatchNorm, whose statistics are a side effect, and Dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Dense(6, 5), nn.BatchNorm1d(5), nn.Dropout(p=0.1)
        self.second = nn.Dense(5, 3)

    def construct(self, x):
        return self.second(self.drop(ops.tanh(self.norm(self.first(x)))))


JUDGED = {"accumulate_step": 2, "pieces": 4, "weight_fn": rows, "on_nonfinite": "skip_window",
          "loss_scaler": amp.DynamicLossScaler(2.0**8, 2, 2)}


@pytest.mark.parametrize(("graphs", "options"), [
    (1, {"accumulate_step": 1}),  # the optimizer is in it; the flush closes nothing
    (2, {"accumulate_step": 2, "loss_scaler": amp.StaticLossScaler(2.0**8)}),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        (2, {"accumulate_step": 2, "clip_norm": 1.0, "has_weight": True}), (2, JUDGED)))])
def test_steps_compile_once_and_mindspore_warns_of_nothing(capfd, graphs, options):
    """In the first epoch only, one graph for all pieces of a size, and one that closes; also for an incomplete window.

    Its "Some side effect nodes were eliminated by mistake" comes with BatchNorm, where a graph
    unpacks a value that it does not use.
    """
    network = Normed().set_train()

    def forward_fn(x, y):
        loss = LOSS(network(x), y)
        return (loss, x.shape[0]) if options.get("has_weight") else loss

    step = make_train_step(forward_fn, sgd(network), **options)
    counts = [compiled_graphs()]
    for _ in range(3):
        for loss in step.epoch(DATA):
            assert (loss.shape, loss.dtype) == ((), ms.float32)
        counts.append(compiled_graphs())
    step.evaluate(DATA)
    assert np.diff(counts).tolist() == [graphs, 0, 0]
    assert compiled_graphs() == counts[-1] + 1
    assert warned(capfd) == []


def test_a_part_that_is_not_used_is_warned_of(capfd):
    """Negative control: what the steps above avoid."""
    network = Normed().set_train()

    def with_aux(x, y):
        loss = LOSS(network(x), y)
        return loss, loss * 2

    grad_fn, optimizer = ms.value_and_grad(with_aux, None, network.trainable_params(), has_aux=True), sgd(network)

    def unpacking(x, y):
        (loss, _), gradients = grad_fn(x, y)
        optimizer(gradients)
        return loss

    ms.jit(unpacking)(*DATA[0])
    assert any("Some side effect nodes were eliminated by mistake" in line for line in warned(capfd))


# --- what is in them --------------------------------------------------------------------------------------------------


def save_graphs():
    """Let MindSpore write its graphs. It reads this with the first graph of a process."""
    os.environ.update(MS_DEV_SAVE_GRAPHS="1", MS_DEV_DUMP_IR_PASSES="validate",
                      MS_DEV_SAVE_GRAPHS_PATH=str(Path("ir").absolute()))


def graphs_of(run):
    """The text of each graph that is compiled meanwhile."""
    seen = set(Path("ir").glob("*_validate_*.ir"))
    run()
    return [file.read_text(encoding="utf-8") for file in sorted(set(Path("ir").glob("*_validate_*.ir")) - seen)]


def control_flow(graph):
    """What a straight graph may not hold: branches, calls, and what MindSpore hands to Python at run time."""
    pattern = r"= (?:PrimFunc_)?(Switch|Partial|Call|SwitchLayer|PyExecute)\(|= %\d+\((?=\[CNode\])"
    return set(re.findall(pattern, graph))


def cached():
    network = MLP()

    def encode(x, y):
        return network(x)

    def contrast(z):
        return ops.cross_entropy(z @ z.T, ops.arange(len(z)))

    return make_grad_cache_step(encode, contrast, sgd(network), 2, pieces=4)


def by_hand():
    network = MLP()
    accumulator = Accumulator(sgd(network), 2, reduction="sum")

    @ms.jit
    def step(*gradients):
        return accumulator(gradients)

    step(*[Tensor(p.asnumpy()) for p in network.trainable_params()])


@pytest.mark.slow
@pytest.mark.fresh_process("jit")
@pytest.mark.parametrize("mode", ["jit"])
def test_the_graphs_of_a_step_hold_no_control_flow_but_one_branch_around_a_judged_update(mode, monkeypatch):
    """Without the branch that CPU gets. Controls: a graph by hand has a Switch."""
    save_graphs()
    get_context = ms.get_context
    monkeypatch.setattr(ms, "get_context", lambda name: "GPU" if name == "device_target" else get_context(name))
    for build, branches in ((lambda: step_of(2, clip_norm=1.0), 0), (lambda: step_of(1), 0), (cached, 0),
                            (lambda: step_of(2, on_nonfinite="skip_microbatch"), 1), (lambda: step_of(**JUDGED), 1)):
        found = list(map(control_flow, graphs_of(lambda build=build: list(build().epoch(DATA)))))
        assert len(found) >= 1
        assert sum(map(bool, found)) == branches
        assert not any("PyExecute" in each for each in found)
    assert any("Switch" in control_flow(graph) for graph in graphs_of(by_hand))


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
        if name == "AssignAdd" and re.fullmatch(r"%para\d+_accumulator\d+\.(first|second)\.weight", buffer):
            found.append([])
            gradient = arguments[1]
            while nodes[gradient][0] != "MatMul":
                found[-1].append(nodes[gradient][0])
                gradient = nodes[gradient][1][0]
    return found
