"""Hostile use: junk arguments, calls in any order, batches of any shape, junk command lines, and a very long run.

Each call either agrees with the oracle or is refused in words, and after a refusal every bit of state is what it was. What hypothesis
draws runs op by op, a millisecond a call. `pytest -m slow` runs more; see RECORDS.md.
"""
import os
import re
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import run_python
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from mindspore import Parameter, Tensor, nn
from mnist_files import embedded_set, write
from pair import METHODS, OPTIMIZERS, SHAPES, Pair, gradients_of, tensors_of

from ms_accum import Accumulator, DataParallel, LocalUpdates, make_train_step
from ms_accum.cli import main as cli
from ms_accum.mnist import fetch
from ms_accum.reference import train
from ms_accum.window import Window

INF, NAN = float("inf"), float("nan")
LOSS = nn.CrossEntropyLoss()


def examples(count):
    """Return settings for `count` examples; conftest.py has the others."""
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def bits(*holders):
    """Return every bit of the state of accumulators and optimizers."""
    state = [p for holder in holders for p in (holder.parameters if isinstance(holder, Accumulator) else holder.get_parameters())]
    return [(p.name, p.asnumpy().tobytes()) for p in state]


# --- arguments ---------------------------------------------------------------------------------------------------------


JUNK = {
    "None": None, "True": True, "0": 0, "-1": -1, "2": 2, "2.5": 2.5, "nan": NAN, "inf": INF, "1e-300": 1e-300, "2**31": 2**31,
    "2**40": 2**40, "10**400": 10**400, "1j": 1j, "1/3": Fraction(1, 3), "Decimal": Decimal(2), "text": "x", "bytes": b"x", "list": [],
    "list of int": [1], "dict": {}, "tuple": (1,), "set": {1}, "array": np.array([1, 2]), "array()": np.array(3),
    "np.bool": np.bool_(True), "np.float32": np.float32(2), "Tensor": Tensor([1, 2]), "Tensor()": Tensor(3), "dtype": ms.float32,
    "object": object(), "class": object, "function": len,
}
WHOLE = {"2", "array()", "Tensor()"}
ACCEPTED = {
    (Accumulator, "optimizer"): set(),
    (Accumulator, "accumulate_step"): WHOLE,
    (Accumulator, "clip_norm"): {"None", "2", "2.5", "inf", "1e-300", "2**31", "2**40", "10**400", "1/3", "np.float32"},
    (Accumulator, "reduction"): set(),
    (Accumulator, "buffer_dtype"): {"None", "dtype"},
    (Accumulator, "on_nonfinite"): set(),
    (Accumulator, "reducer"): {"None"},
    (make_train_step, "forward_fn"): {"class", "function"},
    (make_train_step, "accumulator"): set(),
    (make_train_step, "micro_size"): WHOLE | {"2**31", "2**40", "10**400"},
    (make_train_step, "weight_fn"): {"None", "class", "function"},
    (make_train_step, "loss_scaler"): {"None"},
    (make_train_step, "strategy"): set(),
    (make_train_step, "has_aux"): {"True"},
    (LocalUpdates, "every"): WHOLE,
    (LocalUpdates, "outer_learning_rate"): {"2", "2.5", "1e-300", "2**31", "2**40", "1/3", "np.float32"},
    (LocalUpdates, "outer_momentum"): {"0", "1e-300", "1/3"},
    (DataParallel, "sync"): set(),
    (DataParallel, "shard"): set(),
    (DataParallel, "broadcast"): {"True"},
    (DataParallel, "bucket_mib"): {"2", "2.5", "1e-300", "2**31", "2**40", "1/3", "np.float32"},
}


def refusal(function, **changed):
    """Return what `function` says when it refuses an argument beside others that fit, None if it takes it."""
    weights = [Parameter(Tensor(np.zeros(3), ms.float32), name="w")]
    fitting = {
        Accumulator: lambda: {"optimizer": nn.SGD(weights, 0.1), "accumulate_step": 2},
        make_train_step: lambda: {"forward_fn": LOSS, "accumulator": Accumulator(nn.SGD(weights, 0.1), 2, reduction="mean")},
        DataParallel: dict,
        LocalUpdates: dict,
    }[function]()
    try:
        function(**{**fitting, **changed})
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def test_an_argument_is_taken_or_refused_by_its_name():
    """Refused are exactly those that cannot be meant: "<argument> is ..., expected ..."."""
    for function, argument in ACCEPTED:
        messages = {name: refusal(function, **{argument: junk}) for name, junk in JUNK.items()}
        assert {name for name, message in messages.items() if message is None} == ACCEPTED[function, argument]
        for name, message in messages.items():
            assert message is None or message.startswith(argument), name
            assert message is None or any(remedy in message for remedy in ("expected", "give", "define it")), name


@examples(100)
@given(st.dictionaries(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1), max_size=4), st.integers(1, 2**31 - 1),
       st.lists(st.integers(0, 2**31 - 1), max_size=5))
def test_a_schedule_says_what_the_oracle_says(later, first, updates):
    """Also where a length or a key is as large as int32 can hold, and at the keys themselves."""
    schedule = {**later, 0: first}
    window = Window(schedule)
    for update_step in {*updates, *schedule, *(start - 1 for start in later if start)}:
        assert int(window.length(Tensor(update_step, ms.int32))) == reference.window_length(schedule, update_step)


# --- calls in any order ------------------------------------------------------------------------------------------------


def good(value=1.0):
    return tensors_of([np.full(shape, value) for shape in SHAPES])


BAD_CALLS = {  # method, arguments, and the beginning of what is said
    "no gradients": ("__call__", ((),), r"grads holds 0 gradients, expected 3"),
    "too few": ("add", (good()[:2],), r"grads holds 2 gradients, expected 3"),
    "too many": ("add", ((*good(), good()[0]),), r"grads holds 4 gradients, expected 3"),
    "swapped": ("__call__", (good()[::-1],), r"the gradient of p0 has shape \(4,\), expected \(2, 3\)"),
    "NumPy": ("__call__", (tuple(g.asnumpy() for g in good()),), r"the gradient of p0 is not a Tensor"),
    "a Tensor": ("__call__", (good()[0],), r"grads is not a tuple of Tensors"),
    "a dict": ("add", (dict(enumerate(good())),), r"grads is not a tuple of Tensors"),
    "a generator": ("add", (iter(good()),), r"grads is not a tuple of Tensors"),
    "None": ("__call__", (None,), r"grads is not a tuple of Tensors"),
    "None inside": ("add", ((*good()[:2], None),), r"the gradient of p2 is not a Tensor"),
    "empty": ("add", (tensors_of([np.zeros((0, *shape)) for shape in SHAPES]),), r"the gradient of p0 has shape \(0, 2, 3\)"),
    "flat": ("__call__", (tuple(g.reshape(-1) for g in good()),), r"the gradient of p0 has shape \(6,\)"),
    "complex": ("__call__", (tuple(g.astype(ms.complex64) for g in good()),), r"the gradient of p0 is of Complex64, expected real"),
    "weight -1": ("add", (good(), -1), r"weight is -1, expected a finite number >= 0"),
    "weight NaN": ("__call__", (good(), NAN), r"weight is nan, expected a finite number >= 0"),
    "weight beyond float32": ("__call__", (good(), 1e39), r"weight is (1e\+39|inf), expected a finite number"),
    "weight beyond float": ("add", (good(), 10**400), r"weight is 10{400}, expected a finite number"),
    "weight None": ("add", (good(), None), r"weight is None, expected a number"),
    "weight bool": ("__call__", (good(), True), r"weight is True, expected a number"),
    "weight text": ("add", (good(), "1"), r"weight is '1', expected a number"),
    "weight vector": ("__call__", (good(), Tensor([1.0, 2.0])), r"weight is a Tensor of shape \(2,\), expected shape \(\)"),
    "weight empty": ("add", (good(), Tensor(np.zeros(0), ms.float32)), r"weight is a Tensor of shape \(0,\)"),
    "weight complex": ("__call__", (good(), Tensor(1j, ms.complex64)), r"weight is a Tensor of Complex64, expected a real number"),
    "condition None": ("close_if", (None,), r"condition is neither a Tensor nor a bool"),
    "condition text": ("close_if", ("no",), r"condition is neither a Tensor nor a bool"),
    "condition NumPy": ("close_if", (np.array([True, False]),), r"condition is neither a Tensor nor a bool"),
    "condition vector": ("close_if", (Tensor([True, True]),), r"condition is a Tensor of shape \(2,\), expected shape \(\)"),
    "condition empty": ("close_if", (Tensor(np.zeros(0), ms.bool_),), r"condition is a Tensor of shape \(0,\)"),
}


def refuse(pair, name, compile_it=False):
    """Make a bad call, which says why and changes nothing."""
    method, arguments, message = BAD_CALLS[name]
    before = bits(pair.ours, pair.optimizer)

    def call(*arguments):
        if method == "__call__":
            return pair.ours(*arguments)
        if method == "add":
            pair.ours.add(*arguments)
            return pair.ours.mini_step + 0
        return pair.ours.close_if(*arguments)

    with pytest.raises((TypeError, ValueError), match=message):
        (ms.jit(call) if compile_it else call)(*arguments)
    assert bits(pair.ours, pair.optimizer) == before


@pytest.mark.parametrize("jit", [False, True])
def test_a_bad_call_is_refused_and_changes_no_bit(jit):
    pair = Pair(3, "mean", INF, "skip_window", "momentum")
    for seed in range(4):
        pair.microbatch("__call__", gradients_of(seed), 2.0, 2.0)
    for name in BAD_CALLS:
        refuse(pair, name, jit and name != "weight beyond float")  # MindSpore itself refuses that int in a graph
    pair.microbatch("__call__", gradients_of(7), 2.0, 2.0)


WEIGHTS = st.sampled_from([
    (1.0, 1.0), (0.0, 0), (0.0, Tensor(0.0)), (2.0, 2), (0.5, np.float32(0.5)), (0.25, Fraction(1, 4)), (3.0, Tensor([3], ms.int64)),
    (1.5, Tensor(1.5, ms.float16)), (1.0, Tensor(True)), (-1.0, Tensor(-1.0)), (64.0, Tensor(64.0)),
    (4.0, Parameter(Tensor(4.0), name="weight"))])
STEPS = st.one_of(
    st.integers(1, 5), st.just(2**31 - 1),
    st.dictionaries(st.integers(1, 6), st.integers(1, 4), max_size=3).map(lambda later: {0: 2, **later}))


class AnyOrder(RuleBasedStateMachine):
    """Each call on the accumulator, the same on the oracle; where they differ, hypothesis shrinks the calls to the fewest."""

    @initialize(accumulate_step=STEPS, reduction=st.sampled_from(["sum", "mean"]), clip_norm=st.sampled_from([None, INF, 2.0, 0.01]),
                on_nonfinite=st.sampled_from(["apply", "skip_microbatch", "skip_window"]), optimizer=st.sampled_from([*OPTIMIZERS]))
    def build(self, **options):
        self.pair = Pair(**options)

    @rule(method=st.sampled_from(["__call__", "__call__", "add"]), seed=st.integers(0, 99), weight=WEIGHTS,
          dtype=st.sampled_from([ms.float32, ms.float16]))
    def microbatch(self, method, seed, weight, dtype):
        self.pair.microbatch(method, gradients_of(seed), *weight, dtype)

    @precondition(lambda self: self.pair.oracle.on_nonfinite != "apply")
    @rule(method=st.sampled_from(["__call__", "add"]), seed=st.integers(0, 99), bad=st.sampled_from([NAN, INF, -INF]), weight=WEIGHTS)
    def bad_microbatch(self, method, seed, bad, weight):
        self.pair.microbatch(method, gradients_of(seed, bad), *weight)

    @rule(seed=st.integers(0, 99))
    def masked_microbatch(self, seed):
        self.pair.microbatch("__call__", gradients_of(seed, NAN), 0.0, Tensor(0.0))

    @rule(method=st.sampled_from(["apply", "flush", "reset"]))
    def close(self, method):
        self.pair.close(method)

    @rule(condition=st.booleans())
    def close_if(self, condition):
        self.pair.close("close_if", condition)

    @rule(name=st.sampled_from(sorted(BAD_CALLS)))
    def refuse(self, name):
        refuse(self.pair, name)


@pytest.mark.filterwarnings("ignore:invalid value")  # the oracle adds infinity and -infinity
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_calls_in_any_order_follow_the_oracle(count):
    run_state_machine_as_test(AnyOrder, settings=settings(examples(count), stateful_step_count=30))


def test_compiled_calls_in_a_random_order_follow_the_oracle():
    """Each method of two accumulators in a jitted function of its own, and calls from the host between them."""
    pairs = (Pair({0: 2, 2: 3, 5: 1}, "mean", 2.0, "skip_window", "momentum", prefix="first."),
             Pair(3, "sum", None, "skip_microbatch", "sgd", prefix="second."))

    def both(method):
        first, second = (pair.ask[method] for pair in pairs)
        return ms.jit(lambda_of(first, second))

    def lambda_of(first, second):
        def call(*arguments):
            return first(*arguments), second(*arguments)
        return call

    compiled, met = {method: both(method) for method in METHODS}, set()
    rng = np.random.default_rng(11)
    for i in range(150):
        method = rng.choice(METHODS, p=[0.5, 0.2, 0.05, 0.1, 0.05, 0.1])
        met |= {(method, pair.oracle.mini_step > 0) for pair in pairs}
        if method in ("__call__", "add"):
            weight = float(rng.choice([0.0, 0.5, 1.0, 3.0]))
            gradients = gradients_of(i, rng.choice([NAN, INF]) if rng.random() < 0.1 else None)
            closed = compiled[method](Tensor(weight, ms.float32), *tensors_of(gradients))
            arguments = gradients, weight
        else:
            arguments = (bool(rng.random() < 0.5),) if method == "close_if" else ()
            closed = compiled[method](*map(Tensor, arguments))
        for pair, flag in zip(pairs, closed):
            pair.check(method, flag, *arguments)
            if i % 20 == 0:
                pair.microbatch("__call__", gradients_of(i), 1.0, 1.0)
    assert met == {(method, is_open) for method in METHODS for is_open in (False, True)}
    assert all(pair.oracle.update_step > 20 and pair.oracle.skipped > 3 for pair in pairs)


# --- the command line --------------------------------------------------------------------------------------------------

OPTIONS = ["--data", "--batch-size", "--accumulate-step", "--epochs", "--lr", "--momentum", "--optimizer", "--clip-norm", "--seed",
           "--device-target", "--mode", "--strategy", "--micro-size", "--sync", "--json", "--plot", "--save"]
TEXTS = st.one_of(
    st.sampled_from([
        "", "0", "1", "-1", "nan", "inf", "-inf", "1e400", "1e-400", "1e-300", "1e308", "9" * 30, "9" * 5000, "1_0", "0x10", "2147483648",
        "~", "~nobody-of-that-name", "/", ".", "/dev/null", "run.json", "run.png", "run.ckpt", "a/b", "a\0b", "\udcff", "%s", "%(prog)s",
        "--", "-", "--lr", "a" * 300, "\x1b[31m", "sgd", "adam", "graph", "pynative", "split", "microbatch", "CPU", "GPU", "full"]),
    st.text(st.characters(codec=None, exclude_characters="/"), max_size=8))  # writes into the scratch folder only


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    """The command without its training; the digits are few, the cache is empty and there are no mirrors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "MIRRORS", ())
    monkeypatch.setattr(train, "train", lambda *_: iter([train.Epoch(1, 0.5, 50.0, 1.0, 1.0, 1, np.zeros(1))]))
    return str(write(tmp_path / "digits", embedded_set(9, 5)))


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_command_line_runs_or_is_refused_in_one_line(stubbed, capfd, count):
    """capfd, as it writes what is no UTF-8 to stderr in other words, as Python itself does."""
    @examples(count)
    @given(st.lists(st.one_of(
        st.tuples(st.sampled_from(OPTIONS), TEXTS).map("=".join), st.sampled_from(["--shard", "--compare"]), TEXTS), max_size=4))
    @example(["--json=--"])  # these once ended in a traceback
    @example(["--batch-size=--"])
    @example(["--data=~nobody-of-that-name"])
    def run(arguments):
        assume(not any(argument.startswith("-h") for argument in arguments))
        status = cli.main(["mnist", "--data", stubbed, "--batch-size", "3", *arguments])
        captured = capfd.readouterr()
        if status == 0:
            assert "epoch 1/" in captured.out
            assert captured.err == ""
        else:
            assert (status, captured.out) in ((2, ""), (1, ""))
            assert re.fullmatch(r"ms-accum( mnist)?: error: .+\n", captured.err)

    run()


def test_a_folder_whose_name_is_no_utf_8(stubbed, capsys):
    folder = os.fsdecode(b"digits\xff")
    Path(stubbed).rename(folder)
    assert cli.main(["mnist", "--data", folder, "--batch-size", "3"]) == 0
    assert "data       digits\\udcff: 9 digits" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
@pytest.mark.parametrize("microbatches", [4_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_very_long_run_grows_by_nothing_and_counts_right(microbatches):
    """After a warm-up of 300 windows of 3: windows of 7."""
    script = (Path(__file__).parent / "long_run.py").read_text(encoding="utf-8")
    grown, compiled, mini_step, update_step, finite = run_python(script, str(microbatches)).split()
    print(f"{microbatches} microbatches: memory grew by {int(grown) / 2**20:.2f} MiB after the warm-up")
    assert int(grown) <= 5e6
    assert int(compiled) == 0
    assert (int(update_step), int(mini_step)) == (300 + (microbatches - 900) // 7, (microbatches - 900) % 7)
    assert finite == "True"
