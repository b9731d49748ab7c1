"""Batches of many lengths: declared dynamic shapes make what static shapes make, with one graph; else a hint."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.modes import compiled_graphs, recorded_warnings, running
from support.training import sgd

from ms_accum import make_train_step
from ms_accum.core.window import WEIGHT
from ms_accum.selftest.comparing import difference, values

WORDS, LENGTHS = 7, (5, 3, 4)
LENGTH = Tensor(shape=[4, None], dtype=ms.int32)  # 4 rows of any length
ROWS = Tensor(shape=[None, None], dtype=ms.int32)


class Language(nn.Cell):
    """A network in which each token sees all others, so that padding changes its loss; alike in each test."""

    def __init__(self):
        super().__init__()
        ms.set_seed(1)
        self.embedding, self.head = nn.Embedding(WORDS, 4), nn.Dense(4, WORDS)

    def construct(self, tokens):
        x = self.embedding(tokens)
        return self.head(x * x.mean(1, keep_dims=True))


class MeanLoss(nn.Cell):
    def __init__(self, reduction="mean"):
        super().__init__()
        self.network, self.reduction = Language(), reduction

    def construct(self, tokens, labels):
        return ops.cross_entropy(self.network(tokens).reshape(-1, WORDS), labels.reshape(-1), ignore_index=0,
                                 reduction=self.reduction)


def tokens_of(tokens, labels):
    return (labels != 0).sum()


def batches_of(rows, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    shapes = [(rows or 2 + i % 3, length) for i, length in enumerate(lengths)]
    return [(rng.integers(1, WORDS, s).astype(np.int32), rng.integers(0, WORDS, s).astype(np.int32)) for s in shapes]


def aux_of(loss):
    def with_aux(tokens, labels):
        return loss(tokens, labels), (labels.sum(-1), ops.ones_like(labels).sum())
    return with_aux


def function_of(loss):
    def forward_fn(tokens, labels):
        return loss(tokens, labels)
    return forward_fn


# What takes the batch, and options.
RUNS = {
    "clip": (function_of, {"clip_norm": 0.1, "on_nonfinite": "skip_window"}),
    "pieces": (aux_of, {"pieces": 3, "has_aux": True}),
}


def declared(function, of=LENGTH):
    if isinstance(function, nn.Cell):
        function.set_inputs(labels=of, tokens=of)
        return function
    return ms.enable_dynamic(tokens=of, labels=of)(function)


def trained(function, loss, batches, accumulate_step=3, **options):
    """The parameters, the losses, and the number of graphs that the third epoch and its evaluation compile."""
    step = make_train_step(function, sgd(loss, 0.5), accumulate_step, **options)
    results = []
    for epoch in (batches[:2], batches[:2], batches):
        before = compiled_graphs()
        results += [np.sum([part.asnumpy().sum() for part in flat(result)]) for result in step.epoch(epoch)]
        results.append(step.evaluate(epoch))
    return values(loss.trainable_params()), results, compiled_graphs() - before


def flat(result):
    return [part for entry in result for part in flat(entry)] if isinstance(result, tuple) else [result]


@pytest.mark.parametrize(("name", "mode"), [(name, "graph" if name == "clip" else "jit") for name in RUNS])
def test_declared_lengths_are_trained_alike_by_one_graph(name, mode):
    """As op by op; also a length that comes later. Control: without a declaration, that one is compiled (below)."""
    of, options = RUNS[name]
    options = {"weight_fn": tokens_of, **options}
    batches = batches_of(4, (*LENGTHS, 9))
    found = {}
    for kind in ("declared", "eager"):
        loss = MeanLoss()
        function = declared(of(loss)) if kind == "declared" else of(loss)
        with running("pynative" if kind == "eager" else mode):
            found[kind] = trained(function, loss, batches, **options, eager=kind == "eager")
    parameters, losses, graphs = found["eager"]
    assert difference(found["declared"][0], parameters) < 1e-6
    np.testing.assert_allclose(found["declared"][1], losses, rtol=1e-5)
    assert (found["declared"][2], graphs) == (0, 0)


def test_a_batch_that_contradicts_its_declaration_is_an_error_and_the_step_goes_on():
    loss = MeanLoss()
    step = make_train_step(declared(function_of(loss)), sgd(loss), 2, weight_fn=tokens_of)
    batch, = batches_of(4, (5,))
    for error, message, tokens in (
            (ValueError, r"column tokens of the batch is int32 \(3, 5\), expected the declared int32 of shape "
                         r"\(4, None\); declare", batch[0][:3]),
            (ValueError, r"column tokens of the batch is int32 \(20,\), expected", batch[0].reshape(-1)),
            (TypeError, r"column tokens of the batch is int64 \(4, 5\), expected the declared int32",
             batch[0].astype(np.int64)),
            (TypeError, "column tokens of the batch is int, expected", 5)):
        with pytest.raises(error, match=f"^{message}"):
            step(tokens, batch[1][:3] if len(np.shape(tokens)) == 2 and len(tokens) == 3 else batch[1])
    assert float(step(*batch)) > 0

    unknown = ms.enable_dynamic(tokens=Tensor(shape=None, dtype=ms.int32))(function_of(loss))
    step = make_train_step(declared(function_of(loss)), sgd(loss), 2, pieces=2)
    step(*batch)
    for call in (step, lambda *batch: step.evaluate([batch])):
        with pytest.raises(ValueError, match=r"^column tokens of the batch is int32 \(6, 5\), .* length that changes"):
            call(*batches_of(6, (5,))[0])
    assert step.status().mini_step == 1
    step.reset()

    with pytest.raises(ValueError, match=r"^column tokens of the batch is .*, expected .* of shape \(None\)"):
        make_train_step(unknown, sgd(loss), 2)(*batch)


@pytest.mark.usefixtures("compiled_if_slow")
def test_many_compiled_shapes_cause_one_hint():
    """Control: none with declared shapes, and none op by op."""
    network = nn.Dense(2, 1)

    def forward_fn(x):
        return network(x).mean()

    def hints(**options):
        step = make_train_step(options.pop("function", forward_fn), sgd(network), 2, **options)
        with recorded_warnings() as caught:
            for rows in (*range(1, 11), 1):
                batch = np.ones((rows, 2), np.float32)
                step(batch)
        step.flush()
        return [str(warning.message) for warning in caught]

    said = hints()
    assert len(said) == 1
    assert said[0].startswith("graphs are compiled for 8 shapes of batches by now, and for each further ")
    assert said[0].endswith("by mindspore.enable_dynamic or set_inputs of a Cell; the guide's page on language "
                            "models shows both")
    rows = Tensor(shape=[None, 2], dtype=ms.float32)
    assert hints(function=ms.enable_dynamic(x=rows)(function_of_one(network)), weight_fn=rows_of) == []
    assert hints(eager=True) == []

    def half_declared(x, y):
        return (network(x) * y.sum()).mean()

    step = make_train_step(ms.enable_dynamic(x=rows)(half_declared), sgd(network), 2)
    with pytest.warns(UserWarning, match="for 8 shapes .*: declare each that changes"):
        list(step.epoch((np.ones((2, 2), np.float32), np.ones(columns, np.float32)) for columns in range(3, 11)))


def function_of_one(network):
    def forward_fn(x):
        return network(x).mean()
    return forward_fn


def rows_of(x):
    return x.shape[0]


def less_than_two(x):
    return 2 - x.shape[0]


def length_of(x):
    return len(x)


def test_a_weight_that_a_graph_computes_is_checked_like_a_tensor():
    """`len(x)` of a dynamic shape is a random number in MindSpore 2.10. Control: `x.shape[0]`."""
    for weight_fn in (rows_of, less_than_two, length_of):
        network, rows = nn.Dense(2, 1), Tensor(shape=[None, 2], dtype=ms.float32)
        step = make_train_step(ms.enable_dynamic(x=rows)(function_of_one(network)), sgd(network), 10,
                               weight_fn=weight_fn)
        for count in (1, 3, 2):
            step(Tensor(np.ones((count, 2), np.float32)))
        weight = float(step.boundary.window.sums[WEIGHT])
        assert weight == 6 if weight_fn is rows_of else np.isnan(weight)
        step.reset()
