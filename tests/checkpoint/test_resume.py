"""Runs that go on with a change: rates, other settings of the optimizer and of the accumulator."""
import gc
import re
from itertools import takewhile
from pathlib import Path
from threading import Lock
from unittest.mock import patch

import mindspore as ms
import numpy as np
import pytest
from mindspore import amp, nn, ops
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler as schedulers
from safetensors import safe_open
from support.modes import recorded_warnings

from ms_accum import (
    Accumulator,
    CheckpointError,
    TrainOneStepCell,
    load_checkpoint,
    load_weights,
    make_train_step,
    save_checkpoint,
)
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.checkpoint.checkpoint import _State
from ms_accum.core.facts import given_to
from ms_accum.core.optimizers import rates_of

BATCH = np.ones((4, 2), np.float32)  # the gradient of the weight is 1, so an update moves it by the learning rate


def sgd(rate, bias=None, **options):
    """A maker of an optimizer; `bias`: the rate of the other group."""
    def make(network):
        groups = network.trainable_params() if bias is None else [
            {"params": [network.weight], "lr": rate}, {"params": [network.bias]}]
        return nn.SGD(groups, rate if bias is None else bias, **options)
    return make


def forward_fn_of(network):
    def forward_fn(x):
        return network(x).mean()

    return forward_fn


def built(optimizer, accumulate_step=2, **options):
    network = nn.Dense(2, 1, weight_init="ones")
    return network, make_train_step(forward_fn_of(network), optimizer(network), accumulate_step, **options)


def moved(network, train_step, microbatches=2):
    before = network.weight.asnumpy()[0, 0]
    for _ in range(microbatches):
        train_step(BATCH)
    return round(float(before - network.weight.asnumpy()[0, 0]), 5)


def loaded(network, train_step, **options):
    """What a load says, without the names of files."""
    with recorded_warnings() as caught:
        load_checkpoint("c.safetensors", network, train_step, **options)
    said = [str(warning.message) for warning in caught]
    assert all("\n" not in text and caught[0].filename == __file__ for text in said)
    assert len(said) <= 1
    return said[0].partition("differs from this one: ")[2] if said else ""


def exponential(rate, steps=1):
    return nn.ExponentialDecayLR(rate, 0.5, steps)


def adam_w(rate, **options):
    return lambda network: optim.SGD(network.trainable_params(), rate, **options)


class Table(nn.learning_rate_schedule.LearningRateSchedule):
    """A schedule that holds its rates in a Parameter."""

    def __init__(self, rate):
        super().__init__()
        self.table = ms.Parameter(ms.Tensor([[rate]] * 9, ms.float32), name="table", requires_grad=False)

    def construct(self, update):
        return self.table[update].reshape(())


# The saved run, the one that goes on after two updates, by how much its first update moves, and what the load says.
RATES = {
    "equal": (sgd(0.1), sgd(0.1), 0.1, ""),
    "number": (sgd(0.1), sgd(0.05), 0.05, "learning_rate 0.1 -> 0.05"),
    "list": (sgd([0.1, 0.2, 0.3]), sgd([0.1, 0.2, 0.3]), 0.3, ""),
    "longer list": (sgd([0.1, 0.2]), sgd([0.1, 0.2, 0.4]), 0.4, "learning_rate 2 from 0.1 to 0.2 (10f189be) -> 3 from"),
    "shorter list": (sgd([0.1] * 9), sgd([0.1, 0.2, 0.4]), 0.4, "learning_rate 9 from 0.1 to 0.1 ("),
    "number to list": (sgd(0.1), sgd([0.1, 0.2, 0.4]), 0.4, "learning_rate 0.1 -> 3 from 0.1 to 0.4 ("),
    "list to number": (sgd([0.1, 0.2]), sgd(0.05), 0.05, "learning_rate 2 from 0.1 to 0.2 (10f189be) -> 0.05"),
    "schedule": (sgd(exponential(0.1)), sgd(exponential(0.4)), 0.1, "learning_rate.learning_rate 0.1 -> 0.4"),
    "number to schedule": (sgd(0.1), sgd(exponential(0.4)), 0.1, "learning_rate 0.1 -> mindspore.nn.learning_rate_sch"),
    "schedule with a Parameter": (sgd(Table(0.1)), sgd(Table(0.4)), 0.4, "table 9 from 0.1 to 0.1 ("),
    "two numbers of a schedule": (sgd(exponential(0.1)), sgd(exponential(0.4, 2)), None,
                                  "learning_rate.learning_rate 0.1 -> 0.4, learning_rate.decay_steps 1 -> 2"),
    "group": (sgd(0.1, 0.2), sgd(0.05, 0.2), 0.05, "learning_rate_group_0 0.1 -> 0.05"),
    "group of a list": (sgd([0.1, 0.2], 0.2), sgd([0.1, 0.2, 0.4], 0.2), 0.4, "learning_rate_group_0 2 from"),
    "group of a schedule": (sgd(exponential(0.1), 0.2), sgd(exponential(0.4), 0.2), 0.1, "lr.learning_rate 0.1 -> 0.4"),
    "experimental": (adam_w(0.1), adam_w(0.05), 0.05, "learning_rate_group_0 0.1 -> 0.05"),
    "weight decay": (sgd(0.1), sgd(0.1, weight_decay=0.5), None, "weight_decay 0 -> 0.5"),
    "experimental weight decay": (adam_w(0.1), adam_w(0.1, weight_decay=0.5), None, "weight_decay 0 -> 0.5"),
    "momentum": (sgd(0.1, momentum=0.9), sgd(0.1), 0.1, "momentum 0.9 -> 0.0"),
}


@pytest.mark.parametrize("case", RATES)
def test_what_the_script_gives_the_optimizer_counts(case, compiled_if_slow):
    """Control: the same run without a change. In an open window, too."""
    saved, now, expected, message = RATES[case]
    network, train_step = built(saved)
    moved(network, train_step, 4)
    save_checkpoint("c.safetensors", network, train_step)
    resumed = built(now)
    said = loaded(*resumed)
    assert said.startswith(message)
    assert bool(said) == bool(message)
    first = moved(*resumed)
    assert expected is None or first == pytest.approx(expected, rel=1e-5)
    if "list" not in case:
        train_step(BATCH)
        save_checkpoint("c.safetensors", network, train_step)
        resumed = built(now)
        assert loaded(*resumed) == said
        assert moved(*resumed, 1) == pytest.approx(first, rel=1e-5 if expected else 1)


def test_other_betas_are_named():
    """`nn.AdamWeightDecay` holds them in attributes alone, `nn.Adam` in two places. Control: the same."""
    for optimizer in (nn.AdamWeightDecay, nn.Adam):
        def make(network, beta=0.9, optimizer=optimizer):
            return optimizer(network.trainable_params(), 0.1, beta1=beta)

        save_checkpoint("c.safetensors", *built(make))
        assert loaded(*built(make)) == ""
        assert loaded(*built(lambda network, make=make: make(network, 0.5))) == "beta1 0.9 -> 0.5"


def test_a_schedule_of_the_file_is_not_kept(compiled_if_slow):
    save_checkpoint("c.safetensors", *built(sgd(exponential(0.1))))
    said = loaded(*built(sgd(exponential(0.4))), keep_rates=True)
    assert said == "learning_rate.learning_rate 0.1 -> 0.4, keep_rates=True does not keep learning_rate"


def test_another_optimizer_is_named(compiled_if_slow):
    """In a warning if its state has the same names, else in the error. Control: the same one."""
    def made(kind):
        return built(lambda network: kind(network.trainable_params(), 0.05, weight_decay=0.1))

    save_checkpoint("c.safetensors", *made(optim.Adam))
    assert loaded(*made(optim.Adam)) == ""
    changed = "optimizer mindspore.experimental.optim.adam.Adam -> mindspore."
    assert loaded(*made(optim.AdamW)) == f"{changed}experimental.optim.adamw.AdamW"
    with pytest.raises(CheckpointError, match=rf"missing in .*, with ms_accum\.load_weights \({changed}nn\.optim\.sgd"):
        loaded(*built(sgd(0.1)))


@pytest.mark.parametrize("cell", [False, True])
def test_an_open_window_keeps_what_its_weights_count(cell):
    """Control: a closed one need not, and the same weights fit."""
    def made(weight_fn=None):
        network = nn.Dense(2, 1)
        if cell:
            return network, TrainOneStepCell(nn.WithLossCell(network, nn.L1Loss()), sgd(0.1)(network), 2,
                                             weight_fn=weight_fn)
        return network, make_train_step(lambda x, y: nn.L1Loss()(network(x), y), sgd(0.1)(network), 2, eager=True,
                                        weight_fn=weight_fn)

    def tokens(x, y):
        return x.shape[0] * 3.0

    network, step = made()
    for name in ("open.safetensors", "c.safetensors"):
        step(ms.Tensor(BATCH), ms.Tensor(BATCH[:, :1]))
        save_checkpoint(name, network, step)
    assert loaded(*made()) == ""
    assert loaded(*made(tokens)) == "weights samples -> counted by weight_fn"
    load_checkpoint("open.safetensors", *made())
    with pytest.raises(CheckpointError, match="open window with weights samples, but this run has counted by weight_"):
        load_checkpoint("open.safetensors", *made(tokens))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("loads", [False, True])
def test_a_load_in_on_update_goes_on_in_the_window_of_the_file(loads, eager):
    """After it, no window was closed. Control: without it, the next window has three microbatches."""
    (network, step), files = built(sgd(0.1), 3, eager=eager), ["open.safetensors"] * loads
    for _ in range(2):
        step(BATCH)
    save_checkpoint("open.safetensors", network, step)
    step.on_update(lambda: load_checkpoint(files.pop(), network, step) if files else None)
    step(BATCH)
    assert (step.updated, step.trained) == ((False, 2) if loads else (True, 3))
    step(BATCH)
    assert step.updated == loads


def test_rates_of_the_file_are_kept_if_the_script_says_so(compiled_if_slow):
    """Control: without it, see above; a list of another length does not fit."""
    network, train_step = built(sgd(0.1))
    moved(network, train_step)
    save_checkpoint("c.safetensors", network, train_step)
    resumed = built(sgd(0.05))
    said = loaded(*resumed, keep_rates=True)
    assert said == "learning_rate 0.1 -> 0.05, keep_rates=True keeps learning_rate of the file"
    assert moved(*resumed) == 0.1
    save_checkpoint("c.safetensors", *resumed)
    assert loaded(*built(sgd(0.05))) == "learning_rate 0.1 -> 0.05"  # it was kept in that run
    with pytest.raises(CheckpointError, match=r"keep_rates=True cannot keep learning_rate, which has the shape \(\) "
                       r"in the file and \(2,\) in this run; give as many rates as before, or leave keep_rates out"):
        load_checkpoint("c.safetensors", *built(sgd([0.1, 0.2])), keep_rates=True)
    decayed = built(sgd(0.2, weight_decay=0.5))  # the decay is no Parameter, so that of the script counts
    said = ("learning_rate 0.1 -> 0.2, weight_decay 0 -> 0.5, keep_rates=True keeps learning_rate of the file, "
            "keep_rates=True does not keep weight_decay")
    assert {*loaded(*decayed, keep_rates=True).split(", ")} == {*said.split(", ")}
    save_checkpoint("c.safetensors", *decayed)
    assert loaded(*built(sgd(0.2, weight_decay=0.5))) == "learning_rate 0.1 -> 0.2"
    with pytest.raises(TypeError, match="keep_rates is 1 of type int, expected True or False; say whether"):
        load_checkpoint("c.safetensors", *resumed, keep_rates=1)


def test_an_interrupted_load_does_not_take_rates_of_the_file_for_those_of_the_script(monkeypatch):
    """Control: the same load without an interrupt says nothing, either."""
    network, train_step = built(sgd(0.1))
    moved(network, train_step)
    ops.assign(train_step.accumulator.optimizer.learning_rate, 0.025)
    save_checkpoint("c.safetensors", network, train_step)
    resumed, take = built(sgd(0.1)), _State.take

    def take_rate(state, name, value):
        take(state, name, value)
        if name == "optimizer:learning_rate":
            raise KeyboardInterrupt

    monkeypatch.setattr(_State, "take", take_rate)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint("c.safetensors", *resumed)
    monkeypatch.setattr(_State, "take", take)
    assert float(resumed[1].accumulator.optimizer.learning_rate) == pytest.approx(0.025)
    assert loaded(*resumed) == ""
    assert moved(*resumed) == 0.025


class Unbound:
    """A proxy that raises an error of its own for each name."""

    def __getattr__(self, name):
        raise RuntimeError(name)


class Odd(nn.Optimizer):
    """A user's own, with buffers that are called as MindSpore calls an argument, a lock, and a proxy."""

    def __init__(self, network):
        super().__init__(0.1, network.trainable_params())
        self.momentum = [ms.Parameter(ops.zeros(p.shape[-1:], ms.float16)) for p in self.parameters]
        self.lock, self.proxy, self.owner = Lock(), Unbound(), [network, self]

    def construct(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients):
            ops.assign_sub(parameter, 0.1 * gradient)
        return True


def test_an_optimizer_of_ones_own_may_hold_anything():
    """What it calls momentum, with one entry for each parameter, is a buffer, which the file keeps. Control: its `lr`
    is a rate, which the script gives, of any dtype and size."""
    runs = [built(Odd) for _ in range(2)]
    for network, train_step in runs:
        assert moved(network, train_step) == 0.1
    (network, train_step), resumed = runs
    optimizer = train_step.accumulator.optimizer
    ops.assign(optimizer.momentum[0], ops.ones_like(optimizer.momentum[0]))
    save_checkpoint("c.safetensors", network, train_step)
    assert loaded(*resumed) == ""
    assert resumed[1].accumulator.optimizer.momentum[0].astype(ms.float32).asnumpy().tolist() == [1, 1]
    assert {"learning_rate"} == {*rates_of(optimizer)}
    for values, text in ((np.zeros(2), "2 from 0 to 0 ("), (np.zeros(0), "0 (")):
        optimizer.lr = ms.Parameter(ms.Tensor(values, ms.bfloat16), name="lr")
        assert {"learning_rate", "lr"} == {*rates_of(optimizer)}
        assert given_to(optimizer)["lr"]["lr"].startswith(text)


@pytest.mark.parametrize("driver", ["step", "hand"])
def test_a_rate_that_the_training_has_changed_goes_on(driver, compiled_if_slow):
    """A plateau rule: resumed by the same script, bit-identical and without a note; a new rate counts, also one that is
    assigned before the load, but not in a run that has trained, and a note says so. Control: the initial rate."""
    def train(network, train_step, microbatches):
        if driver == "step":
            return moved(network, train_step, microbatches)
        grad_fn = ms.value_and_grad(lambda x: network(x).mean(), None, train_step.optimizer.parameters)
        before = network.weight.asnumpy()[0, 0]
        for _ in range(microbatches):
            train_step(grad_fn(ms.Tensor(BATCH))[1])
        return round(float(before - network.weight.asnumpy()[0, 0]), 5)

    def make(rate):
        network, train_step = built(sgd(rate))
        if driver == "hand":
            train_step = Accumulator(sgd(rate)(network), 2, reduction="mean")
        return network, train_step, getattr(train_step, "accumulator", train_step).optimizer

    network, train_step, optimizer = make(0.1)
    assert train(network, train_step, 2) == 0.1
    ops.assign(optimizer.learning_rate, 0.025)
    train(network, train_step, 2)
    save_checkpoint("c.safetensors", network, train_step)
    for given, assigned, expected in ((0.1, None, 0.025), (0.05, None, 0.05), (0.1, 0.0125, 0.0125)):
        network, train_step, optimizer = make(given)
        if assigned:
            ops.assign(optimizer.learning_rate, assigned)
        assert loaded(network, train_step) == (
            "" if expected == 0.025 else f"learning_rate 0.1 (0.025 when it was saved) -> {expected}")
        assert train(network, train_step, 2) == expected
    network, train_step, optimizer = make(0.1)
    train(network, train_step, 2)
    for lowered, note in ((0.05, "learning_rate 0.05 -> 0.025 (set it again after the load)"), (0.025, "")):
        ops.assign(optimizer.learning_rate, lowered)  # before a return to the best file
        assert loaded(network, train_step) == note
        assert train(network, train_step, 2) == 0.025


def scaler(value=256, factor=2):
    return amp.DynamicLossScaler(value, factor, 1)


# Settings of the saved run and of the one that goes on, and what the load says.
SETTINGS = {
    "clip_norm": ({}, {"clip_norm": 0.5}, "clip_norm None -> 0.5"),
    "on_nonfinite": ({}, {"on_nonfinite": "skip_window"}, "on_nonfinite apply -> skip_window"),
    "max_skips": ({"on_nonfinite": "skip_window"}, {"on_nonfinite": "skip_window", "max_skips": 3},
                  "max_skips 20 -> 3"),
    "accumulate_step": ({}, {"accumulate_step": 1}, "accumulate_step 2 -> 1"),
    "loss_scaler": ({}, {"loss_scaler": scaler},
                    "loss_scaler None -> DynamicLossScaler(scale_value=256.0, scale_window=1, scale_factor=2, counter=0"
                    "), accumulator:loss_scaler.counter starts afresh, accumulator:loss_scaler.scale_value starts af"),
    "another scale": ({"loss_scaler": scaler}, {"loss_scaler": lambda: scaler(64)}, "loss_scaler DynamicLossScaler("),
    "another factor": ({"loss_scaler": scaler}, {"loss_scaler": lambda: scaler(factor=4)}, "loss_scaler Dynami"),
    "no scaler": ({"loss_scaler": scaler}, {}, "loss_scaler DynamicLossScaler(scale_value=256.0, "),
    "stages": ({}, {"stages": lambda: (GradientNoiseScale(),)}, "stages none -> GradientNoiseScale, ac"),
    "buffer_dtype": ({}, {"buffer_dtype": ms.float64}, "buffer_dtype Float32 -> Float64"),
    "no stages": ({"stages": lambda: (GradientNoiseScale(),)}, {}, "stages GradientNoiseScale -> none"),
}


def made(options):
    return built(sgd(0.1), **{name: value() if callable(value) else value for name, value in options.items()})


@pytest.mark.parametrize("case", SETTINGS)
def test_other_settings_count_at_a_closed_window(case, compiled_if_slow):
    """What the new run lacks is dropped, what the file lacks starts afresh; not in an open window, whose error names a
    way that works. Control: the same settings say nothing in either."""
    old, new, message = SETTINGS[case]
    network, train_step = made(old)
    moved(network, train_step, 2)
    save_checkpoint("c.safetensors", network, train_step)
    assert loaded(*made(old)) == ""
    resumed = made(new)
    said = loaded(*resumed)
    assert said.startswith(message)
    if "loss_scaler" in new:
        now = resumed[1].accumulator.loss_scaler
        assert float(now.scale_value) == (64 if case == "another scale" else 256)
        assert ("loss_scaler.scale_value starts afresh" in said, int(now.counter)) == (True, 0)
    if case.startswith("no "):
        assert "is dropped" in said
    assert moved(*resumed) == (0.1 if case != "clip_norm" else 0.02887) * (2 if case == "accumulate_step" else 1)
    moved(network, train_step, 1)
    save_checkpoint("c.safetensors", network, train_step)
    name = "".join(takewhile(lambda letter: letter != " ", message))
    with pytest.raises(CheckpointError, match=rf"open window with {name} .*; load it with the old settings, train "
                                              r"to the end of the window or call flush\(\), save, and load that"):
        load_checkpoint("c.safetensors", *made(new))
    again = made(old)
    assert loaded(*again) == ""
    assert again[1].flush()
    save_checkpoint("c.safetensors", *again)
    assert loaded(*made(new)).startswith(message)


def test_pieces_may_change_in_an_open_window(compiled_if_slow):
    network, train_step = built(sgd(0.1))
    moved(network, train_step, 3)
    save_checkpoint("c.safetensors", network, train_step)
    resumed = built(sgd(0.1), pieces=2)
    assert loaded(*resumed) == ""
    assert moved(*resumed, 1) == 0.1


# --- weights alone ----------------------------------------------------------------------------------------------------


def weights(network, value):
    return {p.name: ms.Parameter(ms.Tensor(np.full(p.shape, value, np.float32)), name=p.name)
            for p in network.get_parameters()}


@pytest.mark.parametrize(("form", "mode"), [
    ("dict", "jit"), ("ours", "pynative"), ("ckpt", "pynative"), ("safetensors", "pynative"),
    *(pytest.param(form, "jit", marks=pytest.mark.slow) for form in ("ours", "ckpt", "safetensors"))],
    indirect=["mode"])
def test_weights_are_loaded_into_a_step_that_has_begun(form, mode):
    """From each kind of file; the next update begins with them. Controls: MindSpore's loader has no effect, and the
    next epoch, flush, save and load say so; a step that is built again trains."""
    network, train_step = built(sgd(0.1))
    moved(network, train_step, 3)
    other = built(sgd(0.1))
    ms.load_param_into_net(other[0], weights(other[0], 7))
    path = {"dict": "", "ours": "c.safetensors", "ckpt": "m.ckpt", "safetensors": "m.safetensors"}[form]
    if form == "ours":
        save_checkpoint(path, *other)
    elif path:
        ms.save_checkpoint(other[0], path, format=form)
    load_weights(path or weights(network, 7), network)
    moved(network, train_step, 1)
    assert network.weight.asnumpy().tolist() == [[pytest.approx(6.9)] * 2]
    train_step.flush()
    if form == "dict":
        ms.load_param_into_net(network, weights(network, 3))
        for call in (train_step.flush,
                     lambda: save_checkpoint("c.safetensors", network, train_step),
                     lambda: load_checkpoint("c.safetensors", network, train_step),
                     lambda: next(train_step.epoch([BATCH]))):
            with pytest.raises(RuntimeError, match=r"^weight was given new memory after the training had begun \(by "
                               r"load_param_into_net or set_data\), but .*; load weights with ms_accum\.load_weights"):
                call()
        again = make_train_step(forward_fn_of(network), sgd(0.1)(network), 2)
        assert moved(network, again) == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("optimizer", [nn.SGD, nn.AdamWeightDecay, nn.Adam, optim.AdamW])
def test_a_parameter_that_was_replaced_is_reported_op_by_op(optimizer):
    """Control: training, a load of weights and of a file replace none."""
    network, train_step = built(lambda network: optimizer(network.trainable_params(), 0.1), eager=True)
    for _ in range(3):
        assert len(list(train_step.epoch([BATCH] * 3))) == 3
    save_checkpoint("c.safetensors", network, train_step)
    load_checkpoint("c.safetensors", network, train_step)
    load_weights("c.safetensors", network)
    train_step.flush()
    network.bias.set_data(ms.Tensor([3.0]))
    with pytest.raises(RuntimeError, match=r"^bias was given new memory"):
        train_step.flush()


class Centred(nn.Cell):
    """A network with buffers: a mean that it updates, one that is no state, one of whole numbers, and a mere Tensor."""

    def __init__(self):
        super().__init__()
        self.network = nn.Dense(2, 1, weight_init="ones")
        self.register_buffer("mean", ms.Tensor([0.5]))
        self.register_buffer("half", ms.Tensor([0.5]), persistent=False)
        self.register_buffer("count", ms.Tensor([3], ms.int32))
        self.register_buffer("nothing", None)
        self.set_train()

    def construct(self, x):
        y = self.network(x)
        if self.training:
            ops.assign(self.mean, self.mean * self.half + ops.stop_gradient(y.mean(0)))
            ops.assign(self.count, self.count + 1)
        return (y * self.mean).mean()


def test_buffers_of_a_network_are_part_of_a_file():
    """A resumed run ends as one without a stop, in the middle of a window, too. Controls: what is no state; a file that
    lacks them, as older ones do."""
    def build():
        network = Centred()
        return network, make_train_step(network, nn.SGD(network.trainable_params(), 0.01), 2, eager=True)

    network, train_step = build()
    assert len(list(train_step.epoch([BATCH] * 2))) == 2
    train_step(BATCH)
    save_checkpoint("c.safetensors", network, train_step)
    at_save = network.mean.asnumpy().copy()
    train_step(BATCH)
    again, second = build()
    load_checkpoint("c.safetensors", again, second)
    assert (again.mean.asnumpy().tolist(), again.count.asnumpy().tolist()) == (at_save.tolist(), [6])
    assert at_save[0] != 0.5
    second(BATCH)
    assert np.array_equal(again.network.weight.asnumpy(), network.network.weight.asnumpy())
    assert np.array_equal(again.mean.asnumpy(), network.mean.asnumpy())
    assert {*ms.load_checkpoint("c.safetensors", format="safetensors")} >= {"mean", "count"}
    assert "half" not in ms.load_checkpoint("c.safetensors", format="safetensors")

    third = Centred()
    load_weights("c.safetensors", third)
    assert (third.mean.asnumpy().tolist(), third.count.asnumpy().tolist()) == (at_save.tolist(), [6])
    load_weights({p.name: p.copy() for p in again.get_parameters()}, third)  # which are not of the file
    assert third.mean.asnumpy().tolist() == at_save.tolist()

    with recorded_warnings() as caught:
        with patch("ms_accum.checkpoint.checkpoint.buffers_of", lambda network: {}):
            save_checkpoint("old.safetensors", again, second)
        load_checkpoint("old.safetensors", *build())
    assert [str(warning.message).partition("differs from this one: ")[2] for warning in caught] == [
        "buffer count starts afresh, buffer mean starts afresh"]


@pytest.mark.parametrize("eager", [False, True])
def test_a_rate_that_was_replaced_is_reported(eager):
    """By `set_data`, which no update sees. Control: `ops.assign`."""
    network, train_step = built(sgd(0.1), eager=eager)
    moved(network, train_step)
    ops.assign(train_step.accumulator.optimizer.learning_rate, 0.05)
    assert moved(network, train_step) == 0.05
    train_step.accumulator.optimizer.learning_rate.set_data(ms.Tensor(0.01))
    with pytest.raises(RuntimeError, match=r"^learning_rate was given new memory after the training had begun"):
        save_checkpoint("c.safetensors", network, train_step)
    with pytest.raises(RuntimeError, match=r"^learning_rate was given new memory"):
        next(train_step.epoch([BATCH]))
    network, train_step = built(sgd(0.1), eager=eager)
    moved(network, train_step)
    train_step.flush()
    train_step.accumulator.optimizer.learning_rate = ms.Parameter(ms.Tensor(0.01), name="learning_rate")
    with pytest.raises(RuntimeError, match=r"^learning_rate was given new memory"):
        train_step.flush()


@pytest.mark.parametrize("held", [0, 1])
def test_after_a_load_updated_is_false_if_a_window_is_open(held):
    """Control: the file holds no window."""
    network, train_step = built(sgd(0.1))
    for _ in range(2 + held):
        train_step(BATCH)
    save_checkpoint("c.safetensors", network, train_step)
    for _ in range(2 - held):
        train_step(BATCH)
    assert train_step.updated
    load_checkpoint("c.safetensors", network, train_step)
    assert train_step.updated is (held == 0)


@pytest.mark.parametrize("held", [0, 1])
def test_a_network_that_was_renamed_after_its_step_was_built_is_loaded(held):
    """As `nn.CellList([student, teacher])` in the call does. Control: names in the file are those of a new process."""
    def made():
        return built(lambda network: nn.Adam(network.trainable_params(), 0.1))

    network, train_step = made()
    moved(network, train_step, 2 + held)
    save_checkpoint("c.safetensors", nn.CellList([network]), train_step)
    assert network.weight.name == "0.weight"
    with safe_open("c.safetensors", "numpy") as file:
        names = {name for name in file.keys() if name.startswith("accumulator:")}
    assert "accumulator:update_step" in names
    assert not [name for name in names if name.startswith("accumulator:accumulator")]
    moved(network, train_step, 4)
    other, resumed = made()
    load_checkpoint("c.safetensors", nn.CellList([other]), resumed)
    assert int(resumed.accumulator.mini_step) == held
    moved(other, resumed, 4)
    assert other.weight.asnumpy().tolist() == network.weight.asnumpy().tolist()


@pytest.mark.parametrize("mode", ["pynative", "jit"])
def test_replaced_weights_are_reported_in_a_loop_by_hand(mode):
    """From the first flush or save on. Control: as long as nothing was trained, they may be replaced."""
    network = nn.Dense(2, 1, weight_init="ones")
    accumulator = Accumulator(sgd(0.1)(network), 2, reduction="mean")
    grad_fn = ms.value_and_grad(forward_fn_of(network), None, accumulator.weights)

    def add(x):
        return accumulator(grad_fn(x)[1])

    add = add if mode == "pynative" else ms.jit(add)
    accumulator.flush()
    save_checkpoint("c.safetensors", network, accumulator)
    ms.load_param_into_net(network, weights(network, 7))
    for _ in range(3):
        add(ms.Tensor(BATCH))
    accumulator.flush()
    assert network.weight.asnumpy()[0, 0] == pytest.approx(6.8)
    ms.load_param_into_net(network, weights(network, 3))
    for call in (accumulator.flush, lambda: save_checkpoint("c.safetensors", network, accumulator)):
        with pytest.raises(RuntimeError, match=r"^weight was given new memory after the training had begun"):
            call()


@pytest.mark.parametrize(("option", "values"), [
    ("weight_decay", (0.0, 0.5, 0.2)), ("betas", ((0.9, 0.9), (0.5, 0.5), (0.6, 0.6)))])
@pytest.mark.parametrize("eager", [False, True])
def test_an_option_that_was_changed_in_training_is_part_of_a_file(eager, option, values):
    """As rates are: another one of the script counts, and a load says what it takes back. Control: an older file."""
    first, second, third = values

    def made(value=first):
        return built(lambda network: optim.AdamW(network.trainable_params(), 0.1, **{option: value}), 1, eager=eager)

    def change(train_step, value):
        train_step.accumulator.optimizer.param_groups[0][option] = value

    def trained(network, train_step):
        for i in range(3):
            train_step(BATCH * (i + 1))
        return network.weight.asnumpy().tolist()

    network, train_step = made()
    train_step(BATCH)
    save_checkpoint("old.safetensors", network, train_step)
    change(train_step, second)
    train_step(BATCH)
    save_checkpoint("c.safetensors", network, train_step)
    change(train_step, tuple(map(np.float32, second)) if option == "betas" else np.float32(second))
    save_checkpoint("numpy.safetensors", network, train_step)  # NumPy's numbers are no JSON
    change(train_step, second)
    whole, ends = trained(network, train_step), []
    for value in (first, third):
        network, train_step = made(value)
        assert (f"{option}" in loaded(network, train_step)) == (value == third)
        assert train_step.accumulator.optimizer.param_groups[0][option] == (second if value == first else third)
        ends.append(trained(network, train_step))
    assert ends[0] == whole != ends[1]
    network, train_step = made()
    change(train_step, first)
    train_step(BATCH)
    change(train_step, third)
    text = loaded(network, train_step)
    assert text == f"{option} {[*third] if option == 'betas' else third} -> " \
                   f"{[*second] if option == 'betas' else second} (set it again after the load)"
    assert trained(network, train_step) == whole
    with recorded_warnings() as caught:
        load_checkpoint("old.safetensors", network, train_step)
    assert "set it again after the load" in str(caught[0].message)
    assert train_step.accumulator.optimizer.param_groups[0][option] == first


SCHEDULERS = {
    "step": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 2, 2),
    "plateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0, cooldown=2),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_as_the_page_says(kind):
    """With all that the page names. Control: without it."""
    page = (Path(__file__).parents[2] / "tutorials" / "guide" / "checkpoints.md").read_text(encoding="utf-8")
    names = re.findall(r"`(\w+)`", page[page.index("Save these as numbers in `extra`"):].partition(";")[0])[1:]

    def make():
        network, train_step = built(adam_w(0.5))
        return network, train_step, SCHEDULERS[kind](train_step.accumulator.optimizer)

    def rates(train_step, scheduler, metrics):
        found = []
        for metric in metrics:
            found.append(train_step.learning_rate)
            scheduler.step(*[ms.Tensor(metric)] * (kind == "plateau"))
        return found

    network, train_step, scheduler = make()
    moved(network, train_step)
    rates(train_step, scheduler, [1.0, 0.5, 0.6])
    held = {name: float(getattr(scheduler, name)) for name in names if hasattr(scheduler, name)}
    assert {name for name, value in vars(scheduler).items() if isinstance(value, ms.Parameter)} - {"T_0"} <= {*held}
    save_checkpoint("c.safetensors", network, train_step, extra=held)
    expected = rates(train_step, scheduler, [0.7] * 6)
    for is_set in (True, False):
        network, train_step, scheduler = make()
        with recorded_warnings():
            numbers = load_checkpoint("c.safetensors", network, train_step)
        for name, value in numbers.items() if is_set else ():
            ops.assign(getattr(scheduler, name), ms.Tensor(value, getattr(scheduler, name).dtype))
        assert (rates(train_step, scheduler, [0.7] * 6) == expected) is is_set


def test_weights_that_do_not_fit_are_refused():
    """Nothing is then changed. Controls: more than the network holds; a part of it."""
    network, train_step = built(sgd(0.1))
    given = weights(network, 7)
    Path("damaged.ckpt").write_bytes(b"?" * 99)
    for source, error, message in (
            ({"weight": given["weight"]}, ValueError, r"bias is missing in source, expected shape \(1,\); give the"),
            ({**given, "bias": given["weight"]}, ValueError, r"bias is of shape \(1, 2\) in source, expected shape"),
            ("nowhere.safetensors", FileNotFoundError, "there is no checkpoint"),
            ("nowhere.ckpt", FileNotFoundError, "there is no checkpoint"),
            ("damaged.ckpt", CheckpointError, r"damaged\.ckpt is truncated or damaged, so MindSpore cannot read it"),
            ({**given, "bias": [7.0]}, TypeError, "bias is of type list, expected a Tensor; give a dict of Tensors"),
            (7, TypeError, "source is of type int, expected a path or a dict of Tensors; give source, network")):
        with pytest.raises(error, match=message):
            load_weights(source, network)
    with pytest.raises(TypeError, match="network is of type TrainStep, expected a mindspore"):
        load_weights(given, train_step)
    assert network.weight.asnumpy().tolist() == [[1, 1]]
    load_weights({**given, "more": given["bias"]}, network)
    assert network.weight.asnumpy().tolist() == [[7, 7]]
    whole = nn.SequentialCell(nn.Dense(2, 1), nn.Dense(1, 1))
    load_weights({f"0.{name}": value for name, value in given.items()}, whole[0])
    assert whole[0].weight.asnumpy().tolist() == [[7, 7]]


@pytest.mark.parametrize(("keep", "holds"), [
    (lambda p: p, False), (ms.Tensor, False), (lambda p: p.astype(ms.float32), False), (lambda p: p.asnumpy(), False),
    (lambda p: p.copy(), True), (lambda p: p.asnumpy().copy(), True), (lambda p: ms.Tensor(p.asnumpy()), True)])
def test_weights_that_were_kept_without_a_copy_are_refused(keep, holds):
    """They are the present ones. Controls: copies; the network's own Parameters, with another in the place of one."""
    network, train_step = built(sgd(0.1))
    best = {p.name: keep(p) for p in network.get_parameters()}
    moved(network, train_step)
    assert (best["weight"][0, 0] == 1) == holds
    if holds:
        load_weights(best, network)
    else:
        with pytest.raises(ValueError, match=r"^source holds the memory of the network \(weight\), so .*; keep copies"):
            load_weights(best, network)
        if best["bias"] is not network.bias:
            with pytest.raises(ValueError, match=r"^source holds the memory of the network \(bias\), so "):
                load_weights({**best, "weight": ms.Tensor([[1.0, 1.0]])}, network)
        load_weights({**network.parameters_dict(), "weight": ms.Tensor([[1.0, 1.0]])}, network)
    assert network.weight.asnumpy().tolist() == [[1, 1]]


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_number_of_a_users_own_optimizer_that_was_changed_is_named(power):
    """Control: the same number."""
    class Powers(nn.Optimizer):
        def __init__(self, parameters, power):
            super().__init__(0.1, parameters)
            self.power = power

        def construct(self, gradients):
            for parameter, gradient in zip(self.parameters, gradients):
                ops.assign_sub(parameter, self.get_lr() * ops.pow(gradient, self.power))
            return True

    network, train_step = built(lambda network: Powers(network.trainable_params(), 1.0), eager=True)
    moved(network, train_step)
    save_checkpoint("c.safetensors", network, train_step)
    said = loaded(*built(lambda network: Powers(network.trainable_params(), power), eager=True))
    assert ("power 1.0 -> 0.5" in said) == (power == 0.5)


def test_names_in_a_file_do_not_depend_on_steps_that_were_built_before():
    """Folds of one process, whose optimizers live on, each with two steps. Control: the names of Parameters do."""
    held, names, files = [], set(), []

    def fold():
        network = nn.Dense(2, 1)
        network.update_parameters_name("fold.")  # no other test has such names
        held.append(nn.Adam(network.trainable_params(), 0.1))
        for length in (2, 4):
            train_step = make_train_step(forward_fn_of(network), held[-1], length, eager=True)
            list(train_step.epoch([BATCH] * 4))
            if length == 2:
                del train_step
        save_checkpoint("c.safetensors", network, train_step)
        names.add(held[-1].global_step.name.replace("accumulator.fold.weight.", "*"))
        files.append(sorted(ms.load_checkpoint("c.safetensors", format="safetensors")))

    for _ in range(4):
        fold()
        gc.collect()
    assert any(name.startswith("**") for name in names)
    assert all(each == files[0] for each in files)
    assert "optimizer:global_step" in files[0]
