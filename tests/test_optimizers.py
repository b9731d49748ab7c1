"""What an optimizer holds: every one of MindSpore's goes on bit-identically; names of state; its own loss scale."""
import inspect

import mindspore as ms
import numpy as np
import pytest
from conftest import Counting, compiled
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim

from ms_accum import Accumulator, load_checkpoint, save_checkpoint
from ms_accum import checkpoint as checkpoint_module
from ms_accum.optimizers import describe, state_of

MODULES = {"nn": nn, "experimental": optim, "mint": mint.optim}
# Arguments without which state would stay what it was at first, or a step too small to see.
ARGUMENTS = {
    "nn.ASGD": {"lambd": 0.5, "t0": 1.0, "learning_rate": 0.1}, "nn.Adam": {"use_amsgrad": True, "learning_rate": 0.01},
    "nn.Momentum": {"momentum": 0.9, "learning_rate": nn.exponential_decay_lr(0.1, 0.5, 100, 1, 1)},
    "nn.RMSProp": {"centered": True, "momentum": 0.9, "use_locking": False}, "nn.SGD": {"momentum": 0.9},
    "experimental.ASGD": {"lambd": 0.5, "t0": 1.0, "lr": 0.1}, "experimental.Adam": {"amsgrad": True, "lr": 0.01},
    "experimental.Adagrad": {"lr_decay": 0.5}, "experimental.AdamW": {"amsgrad": True, "lr": 0.01},
    "experimental.RMSprop": {"centered": True, "momentum": 0.9}, "experimental.SGD": {"lr": 0.1, "momentum": 0.9},
    "mint.SGD": {"lr": 0.1, "momentum": 0.9},
}
# Base classes; kernels that CPU has not (MindSpore 2.10).
OUT_OF_REACH = {"nn.Optimizer", "experimental.Optimizer", "nn.OptTFTWrapper", "nn.Lamb", "nn.LARS", "mint.AdamW",
                "mint.FusedAdamW"}
# Tensor.add_, with which they update, does nothing there op by op.
ONLY_COMPILED = {"mint.Adam", "mint.SGD"}
NEW = {"mint.FusedAdamW"}  # MindSpore 2.7 has none
STATE_IN_LISTS = {"experimental.NAdam", "experimental.ASGD"}
OPTIMIZERS = {f"{module}.{name}": made for module, of in MODULES.items() for name, made in vars(of).items()
              if inspect.isclass(made) and issubclass(made, (nn.Optimizer, optim.Optimizer))}


def build(name, mode, seed=0):
    """A network, its accumulator (parameters in two groups), and what trains on microbatches `first` to `last`."""
    network = nn.Dense(3, 2)
    parameters = network.trainable_params()
    rng = np.random.default_rng(seed)
    for parameter in parameters:
        parameter.set_data(Tensor(rng.normal(size=parameter.shape), ms.float32))
    optimizer = OPTIMIZERS[name]([{"params": [p]} for p in parameters], **ARGUMENTS.get(name, {}))
    acc = Accumulator(optimizer, 3, reduction="mean")

    def step(grads):
        return acc(grads)

    step = compiled(step, mode)

    def train(first, last):
        for i in range(first, last):
            rng = np.random.default_rng(i)
            step(tuple(Tensor(rng.normal(size=p.shape), ms.float32) for p in parameters))
        return [p.asnumpy().copy() for p in parameters]

    return network, acc, train


def all_of(optimizer):
    return state_of(optimizer)


def named_alone(optimizer):
    return [(p.name, p) for p in optimizer.get_parameters()]


def none_of(optimizer):
    return []


def resumed(name, mode, monkeypatch, whats):
    """Whether a run that was saved in mid-window goes on in fresh objects to the same bits, with each notion of an optimizer's state."""
    network, acc, train = build(name, mode)
    start = train(0, 3)
    train(3, 8)
    for what in whats:
        monkeypatch.setattr(checkpoint_module, "state_of", what)
        save_checkpoint(f"{what.__name__}.ckpt", network, acc)
    uninterrupted, same = train(8, 12), []
    assert all((a != b).any() for a, b in zip(start, uninterrupted))
    for what in whats:
        network, acc, train = build(name, mode, seed=7)
        monkeypatch.setattr(checkpoint_module, "state_of", what)
        load_checkpoint(f"{what.__name__}.ckpt", network, acc)
        same.append(all((a == b).all() for a, b in zip(train(8, 12), uninterrupted)))
    return same


def test_no_optimizer_is_forgotten():
    assert {*ARGUMENTS, *OUT_OF_REACH, *ONLY_COMPILED, *STATE_IN_LISTS} - NEW <= set(OPTIMIZERS)


@pytest.mark.parametrize(("mode", "name"), [
    *(("pynative", name) for name in sorted(set(OPTIMIZERS) - OUT_OF_REACH - ONLY_COMPILED)),
    # 10 to 20 s each
    *(pytest.param("jit", name, marks=pytest.mark.slow) for name in sorted(set(OPTIMIZERS) - OUT_OF_REACH))])
def test_every_optimizer_goes_on_bit_identically(mode, name, monkeypatch):
    """Control, op by op: without the optimizer's state in the file, or without what is in lists, it goes another way."""
    controls = (none_of, named_alone)[:1 + (name in STATE_IN_LISTS)] if mode == "pynative" else ()
    assert resumed(name, mode, monkeypatch, (all_of, *controls)) == [True, *[False] * len(controls)]


def test_in_place_addition_does_nothing_op_by_op():
    """So mint's optimizers update nothing there (MindSpore 2.10, CPU). If this fails one day, ONLY_COMPILED can go."""
    value = Parameter(Tensor([1.0]), name="value")
    value.add_(Tensor([1.0]))
    assert value.asnumpy().item() == 1


class Hoarder(nn.Cell):
    """An optimizer that descends by `rate`, and keeps it and others wherever Python can, without a name."""

    def __init__(self, parameters, inner=None):
        super().__init__(auto_prefix=False)
        self.parameters = parameters
        self.slots = {"first": Parameter(Tensor(0.5)), "others": ({"deep": [Parameter(Tensor(2.0)), 3, None]},)}
        self.by_parameter = {parameter: Parameter(Tensor(3.0)) for parameter in parameters}
        self.cells = [Counting(parameters)]
        self.itself = [self, self.slots, parameters]
        self.twins = [[Parameter(Tensor(1.0), name="twin")], [Parameter(Tensor(1.0), name="twin")]]
        self.inner = inner

    def construct(self, grads):
        for parameter, grad in zip(self.parameters, grads):
            ops.assign_sub(parameter, self.slots["first"] * grad)
        return True


def test_state_is_found_at_any_depth_and_has_a_name_of_its_own():
    network = nn.Dense(3, 2)
    optimizer = Hoarder(network.trainable_params())
    named = dict(state_of(optimizer))
    deep = optimizer.slots["others"][0]["deep"][0]
    assert list(named) == ["slots[first]", "slots[others][0][deep][0]", "by_parameter[0]", "by_parameter[1]",
                           "seen.weight", "seen.bias", "calls", "twins[0][0]", "twins[1][0]"]
    assert named["slots[first]"] is optimizer.slots["first"]
    assert named["slots[others][0][deep][0]"] is deep
    before = describe(optimizer)
    deep.set_data(Tensor(5.0))
    assert describe(optimizer) != before
    assert list(dict(state_of(Hoarder(network.trainable_params())))) == list(named)
    assert state_of(lambda grads: True) == []


def test_state_with_the_same_name_is_saved_and_compiled(mode):
    """In one graph each name may be there once: of one optimizer's state, and of that of two.

    All optimizers of mindspore.experimental call their learning rate learning_rate_group_0.
    """
    def build():
        network = nn.Dense(3, 2, weight_init="zeros", bias_init="zeros")
        network.extra, network.other = (Parameter(Tensor([0.0]), name=name) for name in ("extra", "other"))
        weight, bias, extra, other = network.weight, network.bias, network.extra, network.other
        optimizers = Hoarder([weight]), Hoarder([bias]), optim.SGD([extra], lr=1.0), optim.SGD([other], lr=2.0)
        accs = [Accumulator(optimizer, 1) for optimizer in optimizers]

        def step(weight, one):
            return accs[0]((weight,)), accs[1]((one[:2],)), accs[2]((one[:1],)), accs[3]((one[:1],))
        return network, accs, compiled(step, mode)

    network, accs, step = build()
    accs[0].optimizer.slots["first"].set_data(Tensor(0.25))
    save_checkpoint("c.ckpt", network, accs[0])
    network, accs, step = build()
    load_checkpoint("c.ckpt", network, accs[0])
    step(ops.ones_like(network.weight), ops.ones(3))
    for parameter, expected in ((network.weight, -0.25), (network.bias, -0.5), (network.extra, -1), (network.other, -2)):
        np.testing.assert_allclose(parameter.asnumpy(), expected, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda made: made, nn.LARS, lambda made: Hoarder(made.parameters, [made])],
                         ids=["bare", "LARS", "in a list"])
def test_a_loss_scale_of_the_optimizers_own_is_refused(wrap):
    """It would divide once more: 1,024 x too small. Control: with 1 all is well, as with the remedy, which test_train_step.py tries."""
    parameters = nn.Dense(3, 2).trainable_params()
    with pytest.raises(ValueError, match=r"has loss_scale=1024, expected 1: .*amp\.StaticLossScaler\(1024\) to make"):
        Accumulator(wrap(nn.Momentum(parameters, 1.0, 0.9, loss_scale=1024)), 1)
    Accumulator(wrap(nn.Momentum(parameters, 1.0, 0.9, loss_scale=1)), 1)
