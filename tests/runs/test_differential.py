"""Training runs drawn as a whole, with ms_accum and with plain MindSpore on the undivided batches.

In tests/support/differential, cases.py says what is drawn, and plain.py is the reference. To run a Case that failed
again, give the one that was printed to `follow` in follow.py.

Left out, because MindSpore 2.10 fails by itself on CPU:

- optimizers: nn.Lamb, nn.LARS, mint.AdamW and mint.FusedAdamW have no kernel; the AdaSum wrappers and OptTFTWrapper
  need several devices or other hardware. mint.SGD and mint.Adam do nothing op by op, and nn.AdaFactor fails there for
  some networks: compiled runs only. nn.RMSProp has its own small epsilon, for with a large one the kernel's result
  depends on where it cuts a tensor.
- layers: LSTM in float16 gets a gradient of 0 op by op (levels O2, O3, to_float, half); nn.MultiheadAttention cannot be
  compiled after level O1.
- dtypes: bfloat16 has no MatMul.
- after an error in a kernel MindSpore never runs that graph again: compiled runs go on with a new driver.
"""
import random
from inspect import signature
from itertools import product

import mindspore as ms
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from mindspore import Tensor
from support.differential.accumulating import Accumulating
from support.differential.cases import COMPILED, LEVELS, OP_BY_OP, WITH_AXIS, compose, near_plain, plain_case
from support.differential.defects import DEFECTS, cases, put_back
from support.differential.follow import follow
from support.differential.networks import build_loss
from support.differential.optimizers import build_optimizer

SHARDS, EXAMPLES = 10, 50
UPDATES = 4


def stratified():
    """Cases in which each compiled driver occurs once, each other one three times, each amp level at least twice.

    Windows, errors and checkpoints occur in turn.
    """
    one_graph = {"event": "none", "front": "dense", "norm": "none", "shapes": (6, 6)}
    windows = (3, ("until", 14.0, 4), 2, ((0, 2), (1, 1), (2, 3)), 4, 1)
    second = len(COMPILED + OP_BY_OP)
    for i, driver in enumerate(COMPILED + 3 * OP_BY_OP):
        cut = driver in ("step", "step-pynative")
        level = LEVELS[3 * i % len(LEVELS)]
        fixed = {"accumulate_step": windows[i % len(windows)], "reduction": "mean"}
        if driver == "hand-pynative" and i >= second:
            fixed = {}
        fixed["empty_at"] = None if driver.startswith("model") else (0, None, 5)[i % 3]
        fixed["loops"] = driver.startswith("step") and i // 5 % 2 == 0
        fixed["batch_axis"] = (i if driver in COMPILED else i // 5) % 2 if driver.startswith(WITH_AXIS) else 0
        if driver.startswith("step"):
            fixed.update(evaluate_at=(3, 0)[i // 5 % 2], rate_at=(1, 0, 2)[i % 3], rates="number")
        if driver in COMPILED:
            fixed.update(one_graph, weight="number")
        else:
            event = ("save", "both", "error", "save")[(i + i // 5) % 4]
            fixed.update(event=event, load_into=("fresh", "used")[i // 5 % 2])
            if event != "save":
                fixed["loss"] = ("masked", "mean")[i % 2]
        drops = {"scaler": ("dynamic", 6, 2), "on_nonfinite": "skip_window", "nonfinite_at": 2, "backward_clip": False}
        fixed.update({2: drops, 5: {**drops, "aux": True},
                      second + 1: {"aux": True, "weight": "returned"}}.get(i, {}))
        # A model ends in an incomplete window.
        count = 7 if driver.startswith("model") else 6
        yield compose(random.Random(i).choice, driver=driver, level=level, large=False, count=count, pieces=1 + cut,
                      **fixed)


# Of each driver that is not compiled, one run is fast.
SLOW = [i for i in range(len(COMPILED), len(COMPILED) + 3 * len(OP_BY_OP))
        if (i - len(COMPILED)) // len(OP_BY_OP) != (i - len(COMPILED)) % len(OP_BY_OP) % 3]


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[pytest.mark.slow] * (case.driver in ("hand-jit", "model-graph") or i in SLOW))
    for i, case in enumerate(stratified())], ids=lambda case: f"{case.driver}-{case.level}")
def test_runs_of_each_driver_and_level(case, tmp_path):
    print(case)
    assert follow(case, tmp_path) > len(case.sizes)


# What scripts use together. Compiled, with few graphs: one for all numbers of rows.
_TOGETHER = {"declared": True, "event": "shapes", "shapes": (8, 5)}
TOGETHER = [
    plain_case("step", **_TOGETHER, accumulate_step=((0, 1), (1, 2)), aux=True, evaluate_at=0, rate_at=2, groups=True),
    plain_case("cell-graph", **_TOGETHER, weight="returned", loss="masked", loss_reduction="sum",
               on_nonfinite="skip_window", nonfinite_at=3),
    *(plain_case(driver, event="both", error_at=error_at, save_at=5, load_into=load_into, logs=True,
                 pieces=pieces, on_nonfinite="skip_window", nonfinite_at=2, clip_norm=0.1, count=8, seed=2,
                 accumulate_step=((0, 1), (1, 2), (2, 3)), rates="list", loops=driver != "model-pynative")
      for driver, pieces, error_at, load_into in (
          ("step-pynative", 2, 2, "used"), ("step-pynative", 1, 3, "fresh"), ("model-pynative", 1, 3, "used")))]


@pytest.mark.parametrize("case", [TOGETHER[0], pytest.param(TOGETHER[1], marks=pytest.mark.slow), *TOGETHER[2:]],
                         ids=lambda case: case.driver)
def test_features_that_scripts_use_together(case, tmp_path):
    print(case)
    assert follow(case, tmp_path) > len(case.sizes)


@pytest.mark.parametrize("defect", [
    "the weight that is returned does not count", "the gradient of a sum is weighed",
    "an evaluation is the mean of its batches' means", "the first group's rate is set for all"])
def test_a_defect_that_is_put_back_is_found_op_by_op(defect, monkeypatch, tmp_path_factory):
    """Negative control: by those of the cases below that are not compiled."""
    put_back(defect, monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        follow_each([case for case in cases(defect) if not case.compiled], tmp_path_factory)


@pytest.mark.slow
@pytest.mark.fresh_process(*map(str, range(SHARDS)))  # MindSpore keeps each graph: ten shards would take 14 GB
@pytest.mark.parametrize("shard", range(SHARDS))
def test_any_run(shard, tmp_path_factory):
    """Without shrinking: after an error MindSpore may fail by itself, and each attempt takes seconds."""

    # hypothesis tries the simplest example first, in every shard; without `nontrivial` it would be the same run.
    @seed(shard)
    @settings(max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
              report_multiple_bugs=False)
    @given(nontrivial=st.booleans(), data=st.data())
    def run(nontrivial, data):
        assume(nontrivial)
        kind = near_plain if data.draw(st.booleans()) else compose
        case = kind(lambda options: data.draw(st.sampled_from(options)))
        print(case)
        assert follow(case, tmp_path_factory.mktemp("run")) > 0

    run()


def follow_each(drawn_cases, tmp_path_factory):
    for case in drawn_cases:
        print(case)
        assert follow(case, tmp_path_factory.mktemp("run")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_narrow_draws(defect, tmp_path_factory):
    follow_each(cases(defect), tmp_path_factory)


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_can_be_put_back(defect, monkeypatch):
    """What is replaced takes the same arguments as what takes its place, and comes back."""
    replaced = DEFECTS[defect][1]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    assert all(list(signature(one).parameters) == list(signature(function).parameters)
               for one, (*_, function) in zip(before, replaced, strict=True))
    with monkeypatch.context() as patch:
        put_back(defect, patch)
        assert all(getattr(owner, name) is function for owner, name, function in replaced)
    assert all(getattr(owner, name) is one for one, (owner, name, _) in zip(before, replaced, strict=True))


@pytest.mark.slow
@pytest.mark.fresh_process(*DEFECTS)  # after others in one process, a norm that is too small was not found
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_that_is_put_back_is_found(defect, monkeypatch, tmp_path_factory):
    """Negative control of `test_narrow_draws`."""
    put_back(defect, monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)) as found:
        follow_each(cases(defect), tmp_path_factory)
    print("found:", found.value)


FAST = {("none", "step"), *((level, "cell-pynative") for level in ("none", "O2", "half"))}


@pytest.mark.parametrize(("level", "driver"), [
    pytest.param(*one, marks=[] if one in FAST else [pytest.mark.slow])
    for one in product(LEVELS, ("step", "cell-graph", "cell-pynative"))])
def test_windows_of_one_are_bit_identical_to_the_plain_step(level, driver):
    """One microbatch to a window, whole, without clipping: nothing is divided, so nothing may be rounded differently.

    In graph mode, MindSpore gives Momentum and Adam float16 gradients that depend on what else is in the graph (on a
    factor of 1, say); SGD gets the same ones.
    """
    optimizer = "nn.SGD" if level == "half" else "nn.Momentum"
    shapes = (6, 5) if driver == "step" else (6, 6)  # a cell weighs what differs from its first batch
    case = plain_case(driver, level=level, optimizer=optimizer, accumulate_step=1, count=UPDATES, shapes=shapes)
    print(case)
    loss = build_loss(case, case.seed)
    optimizer = build_optimizer(case, loss.trainable_params())
    grad_fn = ms.value_and_grad(loss, None, optimizer.parameters)

    def plain(*batch):
        value, gradients = grad_fn(*batch)
        optimizer(gradients)
        return value

    def bits(cell):
        return [p.asnumpy().tobytes() for p in cell.trainable_params()]

    step, accumulating, start = ms.jit(plain) if case.compiled else plain, Accumulating(case, case.seed), bits(loss)
    for batch in case.batches():
        step(*map(Tensor, batch))
    with accumulating.driver:
        accumulating.train(case.batches())
    status = accumulating.boundary.status()
    assert [status.update_step, status.closed_windows] == [UPDATES] * 2
    assert all(one != other for one, other in zip(start, bits(loss)))
    assert bits(accumulating.loss) == bits(loss)
