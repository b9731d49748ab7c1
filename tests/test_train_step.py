"""make_train_step: every strategy against the oracle, loss scalers, token-weighted exactness, compilations, refusals."""
from itertools import product

import mindspore as ms
import numpy as np
import pytest
import reference
from conftest import MLP, batches, compiled_graphs, difference, in_modes, tensors, values
from following import IGNORE, LOSS, counting, follow, forward_of, gradient_of, op_by_op, relative, run_as, warned
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, amp, nn

from ms_accum import Accumulator, make_train_step

SCALERS = {"none": lambda: None, "static": lambda: amp.StaticLossScaler(1024), "dynamic": lambda: amp.DynamicLossScaler(2**10, 2, 2)}
RUNS = st.fixed_dictionaries({
    "driver": st.sampled_from(["fused", "split"]), "sizes": st.lists(st.integers(1, 9), min_size=1, max_size=5),
    "micro_size": st.integers(1, 9), "accumulate_step": st.sampled_from([1, 2, 3, {0: 1, 2: 3}]),
    "clip_norm": st.sampled_from([0.7, None]), "aux": st.sampled_from([None, "rows", "tuple"]), "scaler": st.sampled_from([*SCALERS])})


def run(scaler="none", **options):
    assert follow(loss_scaler=SCALERS[scaler](), **options) <= 1e-6


@example({"sizes": [7, 7, 2], "micro_size": 7}).via("as many pieces as samples, and more")
@example({"sizes": [7, 2], "micro_size": 10**9}).via("far more")
@example({"sizes": [7, 7, 7], "micro_size": 4, "aux": "tuple"}).via("a ragged last piece")
@settings(max_examples=15)
@given(RUNS)
def test_any_run_follows_the_oracle(options):
    with op_by_op():
        run(**options)


@pytest.mark.slow
@settings(max_examples=25)
@given(RUNS)
def test_any_compiled_run_follows_the_oracle(options):
    run(**options)


@pytest.mark.parametrize(("context", "graphs", "options"), [
    ("jit", 3, {"sizes": [6, 6, 2]}),
    ("jit", 2, {"sizes": [7] * 5, "micro_size": 3, "aux": "tuple", "scaler": "static", "accumulate_step": {0: 1, 2: 3}}),
    ("jit", 2, {"driver": "split", "sizes": [6] * 3}),
    ("graph", 4, {"driver": "split", "sizes": [6] * 3, "micro_size": 4, "aux": "rows", "scaler": "dynamic"}),
])
def test_compiled_runs_follow_the_oracle_and_compile_once(mode_named, capfd, context, graphs, options):
    """In the first epoch only, and without a warning: a graph for each size of a batch and one for flush. "split": a graph for each
    size, one for the update, one that joins pieces, one that says whether the window is finite.
    """
    mode_named(context)
    compiled = [compiled_graphs()]
    run(**options, epochs=2, after_epoch=lambda: compiled.append(compiled_graphs()))
    assert np.diff(compiled).tolist() == [graphs, 0]
    assert warned(capfd) == []


def test_wrong_weights_are_seen():
    """Negative control: pieces of 7 = 3 + 3 + 1 that all count the same are not the undivided batch."""
    def equal(x, y):
        return 1.0

    with op_by_op(), pytest.raises(AssertionError):
        follow(sizes=[7, 7], micro_size=3, weight_fn=equal)


# --- loss scaling ------------------------------------------------------------------------------------------------------


class Overflowing(nn.Cell):
    """y = w x, where a float16 gradient of 2**15 x 2 overflows on the way back and 2**15 x 0.5 does not."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor([1.0], ms.float32), name="w")

    def construct(self, x):
        return (self.w.astype(ms.float16) * x.astype(ms.float16)).astype(ms.float32).mean()


@pytest.mark.parametrize(("mode", "strategy", "on_nonfinite"), in_modes(
    [*product(("fused", "split"), ("apply", "skip_window"))], [("fused", "skip_window")]))
def test_an_overflow_drops_the_window_and_halves_the_scale_once(mode, strategy, on_nonfinite):
    network = Overflowing()
    scaler = amp.DynamicLossScaler(2**15, 2, 2)
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.5, 0.9), 3, reduction="mean", on_nonfinite=on_nonfinite)
    train_step = make_train_step(network, acc, loss_scaler=scaler, strategy=strategy)
    seen = []
    for x in [0.25, 2.0, 0.25] + [0.5] * 3 + [0.25] * 7:
        with run_as(mode):
            loss = train_step(Tensor([x], ms.float32))
        assert float(loss) == pytest.approx(float(network.w.asnumpy()[0]) * x, rel=2e-3) or int(acc.mini_step) == 0
        seen.append((float(scaler.scale_value), int(scaler.counter), int(acc.update_step), int(acc.skipped)))
    start = (2**15, 0, 0, 0)       # the second microbatch overflows: its gradient is 2 * 2**15
    dropped = (2**14, 0, 0, 1)
    assert seen == [start] * 2 + [dropped] * 3 + [(2**14, 1, 1, 1)] * 3 + [(2**15, 0, 2, 1)] * 3 + [(2**15, 1, 3, 1)] * 2
    assert int(acc.mini_step) == 1
    velocity, w = 0.0, 1.0
    for gradient in (0.5, 0.25, 0.25):
        velocity = 0.9 * velocity + gradient
        w -= 0.5 * velocity
    assert float(network.w.asnumpy()[0]) == pytest.approx(w, rel=1e-6)


@pytest.mark.parametrize(("factor", "x", "scaler", "expected"), [
    (2.0**16, 2.0, "none", np.inf), (1e-8, 1.0, "none", 0.0), (1e-8, 1.0, "static", 1e-8)], ids=["overflow", "underflow", "scaled"])
def test_what_a_scale_saves(factor, x, scaler, expected):
    """Without one, float16 overflows (the control of the test above) or flushes a gradient of 1e-8 to zero."""
    network = Overflowing()

    def forward_fn(x):
        return network(x) * factor

    with op_by_op():
        (gradient,), _ = gradient_of(forward_fn, network, (Tensor([x], ms.float32),), loss_scaler=SCALERS[scaler]())
    assert float(gradient[0]) == pytest.approx(expected, rel=2e-3)


class AnyScaler(amp.StaticLossScaler):
    """With a scale that MindSpore's own refuse to be built with."""

    def __init__(self, scale):
        super().__init__(1.0)
        self.scale_value = Parameter(Tensor(scale, ms.float32), name="scale_value")


def mean_accumulator(**options):
    options.setdefault("reduction", "mean")
    return Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, **options)


def test_a_loss_scale_that_nothing_can_be_divided_by_is_refused():
    acc = mean_accumulator()
    for scaler in (amp.StaticLossScaler(float("nan")), amp.DynamicLossScaler(float("inf"), 2, 5),
                   *map(AnyScaler, (float("-inf"), 0.0, -2.0, [2.0, 2.0]))):
        with pytest.raises(ValueError, match=r"the loss scale is .*, expected one finite number > 0; give e\.g\. amp\.DynamicLossScaler"):
            make_train_step(LOSS, acc, loss_scaler=scaler)
        assert acc.loss_scaler is None
    make_train_step(LOSS, acc, loss_scaler=AnyScaler(0.5))


def test_a_scaler_is_state_of_the_accumulator():
    accumulators, names = [mean_accumulator(), mean_accumulator()], []
    for acc in accumulators:
        scaler = SCALERS["dynamic"]()
        make_train_step(LOSS, acc, loss_scaler=scaler)
        make_train_step(LOSS, acc, loss_scaler=scaler, strategy="split")
        assert [p.name.split(".", 1)[1] for p in acc.parameters[-2:]] == ["loss_scaler.scale_value", "loss_scaler.counter"]
        assert acc.parameters[-2] is scaler.scale_value
        names += [p.name for p in acc.parameters]
    assert len(set(names)) == len(names)


def test_bad_loss_scalers_are_refused():
    scaled, scaler, unscaled, fresh = mean_accumulator(), SCALERS["static"](), mean_accumulator(), SCALERS["static"]()
    make_train_step(LOSS, scaled, loss_scaler=scaler)
    opened = mean_accumulator()
    opened.add(tuple([p * 0 for p in opened.optimizer.parameters]))
    for acc, given_scaler, error, message in (
            (unscaled, 1024, TypeError, r"loss_scaler is of type int, expected a mindspore.amp.LossScaler; give e.g. amp"),
            (scaled, fresh, ValueError, r"already has another loss_scaler"),
            (unscaled, scaler, ValueError, r"the loss_scaler belongs to another accumulator, .* give each accumulator its own"),
            (opened, fresh, ValueError, r"the open window holds gradients without a loss scale; give the loss_scaler before, or reset"),
            (scaled, None, ValueError, r"the accumulator has a loss_scaler, .* give the same one here"),
            (mean_accumulator(on_nonfinite="skip_microbatch"), fresh, ValueError,
             r"loss_scaler with on_nonfinite=\"skip_microbatch\": .* skipped every time")):
        with pytest.raises(error, match=message):
            make_train_step(LOSS, acc, loss_scaler=given_scaler)


# --- token-weighted exactness ------------------------------------------------------------------------------------------


def token_count(tokens, targets):
    return (targets != IGNORE).astype(ms.int32).sum()


@pytest.mark.parametrize("mode", ["jit", "pynative"])
def test_the_token_mean_is_that_of_the_undivided_batch(mode):
    """Pieces of 2 with two labels, with one, and without any: there the mean loss is 0/0, and so are its gradient and its aux."""
    network, (x, y) = MLP(), batches([6])[0]
    y = np.where(np.arange(6) < 3, y, IGNORE)

    def forward_fn(x, y):
        loss = LOSS(network(x), y)
        return loss, loss

    with op_by_op():
        whole, (loss, _) = gradient_of(forward_fn, network, tensors(x, y), has_aux=True)
        mean_of_means, (wrong_loss, _) = gradient_of(forward_fn, network, tensors(x[:4], y[:4]), has_aux=True, micro_size=2)
    with run_as(mode):
        cut, (cut_loss, aux) = gradient_of(forward_fn, network, tensors(x, y), has_aux=True, micro_size=3, weight_fn=token_count)
    assert np.isfinite(float(loss))
    assert float(aux) == float(cut_loss) == pytest.approx(float(loss), rel=1e-6)
    assert relative(cut, whole) <= 1e-6
    assert relative(mean_of_means, whole) > 1e-2  # what transformers did until #34191
    assert abs(float(wrong_loss) - float(loss)) > 1e-3
    assert np.isnan(float(forward_fn(*tensors(x[4:], y[4:]))[0]))  # control: there is something to guard against


@pytest.mark.parametrize("mode", ["jit", "pynative"])
def test_a_bad_piece_is_skipped_alone(mode):
    network, (x, y) = MLP(), batches([6])[0]
    x[2] = np.nan  # in the second of three pieces
    acc = counting(network, on_nonfinite="skip_microbatch")
    train_step = make_train_step(forward_of(network), acc, micro_size=3)
    with run_as(mode):
        train_step(*tensors(x, y))
    kept = [0, 1, 4, 5]
    _, expected = reference.loss_and_gradients(values(network.trainable_params()), x[kept], y[kept])
    assert (int(acc.skipped), int(acc.update_step)) == (1, 1)
    assert difference(values(acc.optimizer.seen), expected) <= 1e-5  # a gradient of 4 samples, in float32 against float64
    with run_as(mode):
        train_step(*tensors(np.full_like(x, np.nan), y))
    assert (int(acc.skipped), int(acc.mini_step), int(acc.update_step)) == (4, 0, 1)


# --- bad arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "message", "options"), [
    (TypeError, r"forward_fn is of type int, expected a function", {"forward_fn": 3}),
    (TypeError, r"weight_fn is of type float, expected a function", {"weight_fn": 2.0}),
    (TypeError, r"accumulator is of type NoneType, expected a MindSpore optimizer", {"accumulator": None}),
    (ValueError, r"the accumulator has reduction='sum', expected \"mean\": .* N times too large", {"accumulator": {"reduction": "sum"}}),
    (ValueError, r"micro_size is 0, expected an int >= 1", {"micro_size": 0}),
    (TypeError, r"micro_size is True of type bool, expected an int >= 1", {"micro_size": True}),
    (TypeError, r"micro_size is 2\.0 of type float, expected an int >= 1", {"micro_size": 2.0}),
    (ValueError, r"strategy is 'lazy', expected one of 'fused', 'split'", {"strategy": "lazy"}),
    (TypeError, r"has_aux is 1 of type int, expected True or False", {"has_aux": 1}),
    (TypeError, r"forward_fn is a lambda whose source.*define it with def", {"forward_fn": lambda x: x.mean()}),
    (TypeError, r"weight_fn is a lambda", {"weight_fn": lambda x, y: 1}),
])
def test_bad_arguments_are_refused(error, message, options):
    given = options.pop("accumulator", {})
    arguments = {"forward_fn": LOSS, "accumulator": given if given is None else mean_accumulator(**given), **options}
    with pytest.raises(error, match=message):
        make_train_step(**arguments)


def test_a_lambda_in_a_statement_of_its_own_is_taken():
    alone = lambda x: x.mean()  # noqa: E731
    acc = mean_accumulator()
    assert make_train_step(alone, acc).accumulator is acc


def test_a_parameter_frozen_after_the_optimizer_was_made_is_refused():
    acc = mean_accumulator()
    acc.optimizer.parameters[0].requires_grad = False
    with pytest.raises(ValueError, match=r"first\.weight has requires_grad=False"):
        make_train_step(LOSS, acc)
