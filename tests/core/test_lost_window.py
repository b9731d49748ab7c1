"""A window that is lost is reported: at the end of the process, and when its accumulator is collected."""
import gc
import re
import warnings

import pytest
from support.processes import run_python
from support.training import sgd

from ms_accum import load_checkpoint, make_train_step, save_checkpoint
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.core

BATCHES = [tensors(x, y) for x, y in batches([6, 6, 6])]
LOST = (r"^a window of the accumulator for SGD of first\.weight \(number \d+\) that holds 1 microbatch is lost: .*; "
        r"train with train_step\.epoch\(batches\), .*FlushCallback\(\)")


def saved(network, train_step):
    save_checkpoint("run.safetensors", network, train_step)


def loaded(network, train_step):
    saved(network, train_step)
    train_step.accumulator.reset()
    load_checkpoint("run.safetensors", network, train_step)


def saved_before(network, train_step):
    train_step.flush()
    train_step(*BATCHES[1])
    saved(network, train_step)
    train_step.flush()
    train_step(*BATCHES[2])


ENDS = {  # and whether a window is lost then
    "nothing": (lambda network, train_step: None, True), "saved before": (saved_before, True),
    "apply": (lambda network, train_step: train_step.accumulator.apply(), False),
    "flush": (lambda network, train_step: train_step.flush(), False),
    "reset": (lambda network, train_step: train_step.accumulator.reset(), False),
    "epoch": (lambda network, train_step: list(train_step.epoch(BATCHES[:2])), False),
    "saved": (saved, False), "loaded": (loaded, False),
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("end", ENDS)
def test_an_accumulator_that_is_collected_with_an_open_window_says_so(end):
    """By its optimizer and first parameter, at the line that collects it. Control: not if the window was applied, saved
    or reset."""
    (do, lost), network = ENDS[end], MLP()
    train_step = make_train_step(mean_loss(network), sgd(network), 2)
    train_step(*BATCHES[0])
    do(network, train_step)
    gc.collect()  # what earlier tests have left
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del network, train_step
        gc.collect()
    caught = [warning for warning in caught if "is lost" in str(warning.message)]
    assert [bool(re.search(LOST, str(warning.message))) for warning in caught] == [True] * lost
    assert [warning.filename for warning in caught] == [__file__] * lost


SCRIPT = """
import sys
import numpy as np
from mindspore import nn, set_context, GRAPH_MODE
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model
from ms_accum import FlushCallback, TrainOneStepCell
set_context(mode=GRAPH_MODE)
rows = [(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)) for _ in range(5)]
cells = []
for steps, callbacks in ((2, [FlushCallback()]), (3, [])):
    network = nn.Dense(2, 1)
    cells.append(TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), nn.SGD(network.trainable_params()), steps))
    Model(cells[-1]).train(1, GeneratorDataset(rows, ["x", "y"]), callbacks=callbacks, dataset_sink_mode=False)
    print(int(cells[-1].accumulator.update_step), "updates")
sys.stderr = sys.stdout
"""


@pytest.mark.slow
def test_a_model_without_the_callback_says_so_at_the_end_of_the_process():
    """One update of two, in windows of three. Control: with FlushCallback, three in windows of two, without a word."""
    output = run_python(SCRIPT)
    assert output.startswith("3 updates\n1 updates\n")
    assert re.findall("a window .* is lost", output) == [
        "a window of the accumulator for SGD of weight (number 1) that holds 2 microbatches is lost"]


REBUILT = """
import gc, sys
import numpy as np
from mindspore import Tensor, nn
from ms_accum import make_train_step
network = nn.Dense(2, 1)
batch = Tensor(np.ones((4, 2), np.float32))
sys.stderr = sys.stdout


def forward_fn(x):
    return network(x).mean()


for _ in range(3):
    train_step = make_train_step(forward_fn, nn.SGD(network.trainable_params()), 4)
    train_step(batch)
gc.collect()
print("the cell was run three times")
"""


@pytest.mark.slow
def test_each_lost_window_is_reported_when_its_step_is_replaced():
    """As a cell of a notebook that is run again. Python shows a warning of the same text once."""
    before, _, after = run_python(REBUILT).partition("the cell was run three times")
    assert [said.count("is lost: ") for said in (before, after)] == [2, 1]
