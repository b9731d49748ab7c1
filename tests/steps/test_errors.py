"""What a step says first when its arguments or columns do not fit: what was wrong, got, expected, and the remedy."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.modes import running

from ms_accum import TrainOneStepCell, make_train_step

NETWORK = nn.Dense(8, 3)
LOSS = nn.CrossEntropyLoss()
DATA, LABEL = np.ones((4, 8), np.float32), np.zeros(4, np.int32)


def forward_fn(data, label):
    return LOSS(NETWORK(data), label)


def without_return(data, label):
    LOSS(NETWORK(data), label)


def sgd():
    return nn.SGD(NETWORK.trainable_params(), 0.1)


def compiled(data, label):
    make_train_step(forward_fn, sgd(), 2)(data, label)


def by_name(data, label):
    make_train_step(forward_fn, sgd(), 2)(label=label, data=data)


def in_pieces(data, label):
    make_train_step(forward_fn, sgd(), 2, pieces=2)(data, label)


def op_by_op(data, label):
    make_train_step(forward_fn, sgd(), 2, eager=True)(data, label)


def in_a_cell(data, label):
    TrainOneStepCell(nn.WithLossCell(NETWORK, LOSS), sgd(), 2)(Tensor(data), Tensor(label))


def in_a_compiled_cell(data, label):
    with running("jit"):
        in_a_cell(data, label)


DRIVERS = [op_by_op, pytest.param(compiled, marks=pytest.mark.slow), pytest.param(by_name, marks=pytest.mark.slow),
           in_pieces, in_a_cell, in_a_compiled_cell]
COLUMNS = {
    "float64": (DATA.astype(np.float64), LABEL,
                "MatMul does not take the batch: column 0 (data) is float64 (4, 8), column 1 (label) is int32 (4,), "
                "the parameters are float32; give column 0 (data) as float32"),
    "uint8": (DATA.astype(np.uint8), LABEL,
              "MatMul does not take the batch: column 0 (data) is uint8 (4, 8), column 1 (label) is int32 (4,), the "
              "parameters are float32; give column 0 (data) as int32 (labels, tokens) or float32 (data)"),
    "int64": (DATA, LABEL.astype(np.int64),
              "CrossEntropyLoss does not take the batch: column 0 (data) is float32 (4, 8), column 1 (label) is int64 "
              "(4,), the parameters are float32; give column 1 (label) as int32 (labels, tokens) or float32 (data)"),
    "swapped": (LABEL, DATA,
                "MatMul does not take the batch: column 0 (data) is int32 (4,), column 1 (label) is float32 (4, 8), "
                "the parameters are float32; are the columns in the order of (data, label)?"),
}


class Mixed(nn.Cell):
    """A layer in 16 bits beside Parameters of 32, as a LoRA by hand in a network with `to_float`."""

    def __init__(self):
        super().__init__()
        self.base, self.low = nn.Dense(8, 3), ms.Parameter(ms.Tensor(np.ones((8, 3)), ms.float32))
        self.to_float(ms.float16)

    def construct(self, x):
        return self.base(x) + ops.matmul(x, self.low)


def test_where_the_batch_seems_right_the_network_is_named():
    """A graph does not mix dtypes. Controls: op by op, it does; swapped columns are named alone, above."""
    network = Mixed()

    def forward_fn(data, label):
        return ops.cross_entropy(network(data).astype(ms.float32), label)

    with pytest.raises(TypeError, match=r"^MatMul\w* does not take the batch: .* in the order of \(data, label\)\? "
                       r"If so, look into the network: .* several dtypes \(to_float\), which no graph mixes\n"):
        make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.1), 2)(DATA, LABEL)
    assert make_train_step(forward_fn, nn.SGD(network.trainable_params(), 0.1), 1, eager=True)(DATA, LABEL) > 0


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("driver", DRIVERS)
def test_columns_of_a_wrong_dtype_or_order_are_named_first(driver, name):
    """Then comes what MindSpore says, with its type. Control: the right columns."""
    data, label, said = COLUMNS[name]
    with pytest.raises((TypeError, ValueError), match=r"^\w+ does not take the batch") as error:
        driver(data, label)
    lines = str(error.value).splitlines()
    assert lines[0] == said
    assert lines[1].startswith("For '")
    if name == "int64":
        driver(DATA, LABEL)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("error", [RuntimeError("For 'Gather', the index is too large"), ValueError("no such label")])
def test_other_errors_are_left_alone(error):
    def fails(data, label):
        raise error

    with pytest.raises(type(error)) as raised:
        make_train_step(fails, sgd(), 2, eager=True)(DATA, LABEL)
    assert str(raised.value) == str(error)


@pytest.mark.parametrize("built", [
    lambda function: make_train_step(function, sgd(), 2),
    lambda function: make_train_step(function, sgd(), 2, eager=True),
    lambda function: make_train_step(forward_fn, sgd(), 2, weight_fn=function)])
@pytest.mark.parametrize("function", [
    ms.value_and_grad(forward_fn, None, NETWORK.trainable_params()), ms.grad(forward_fn)])
def test_a_function_that_computes_gradients_is_an_error(built, function):
    with pytest.raises(TypeError, match=r"_fn computes gradients .*, expected the function itself.*; give what was "):
        built(function)
    built(forward_fn)  # negative control


@pytest.mark.usefixtures("compiled_if_slow")
@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_forgotten_return_is_named(eager):
    if eager:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    train_step = make_train_step(without_return, sgd(), 2, eager=eager)
    with pytest.raises(TypeError, match=r"^forward_fn returned None, expected the loss alone; is its `return` mi"):
        train_step(DATA, LABEL)


@pytest.mark.parametrize("build", [make_train_step, TrainOneStepCell])
def test_a_loss_function_beside_the_network_is_named(build):
    """As `Model` takes it. Control: in a cell."""
    network, optimizer = NETWORK, sgd()
    with pytest.raises(TypeError, match=r"^accumulate_step is of type CrossEntropyLoss, expected the number of .*Cell"):
        build(network, optimizer, LOSS)
    with pytest.raises(TypeError, match=r"^optimizer is of type CrossEntropyLoss, expected a MindSpore optimizer"):
        build(network, LOSS, optimizer)
    build(nn.WithLossCell(network, LOSS), optimizer, 4)


@pytest.mark.usefixtures("uncompiled")
def test_a_network_without_loss_is_named():
    """Control: a function that does not take the columns is not told about a loss."""
    train_step = make_train_step(NETWORK, sgd(), 2, eager=True)
    with pytest.raises(ValueError, match=r"loss of shape \(4, 3\).*; if it computes no loss, give nn.WithLossCell\("):
        train_step(DATA)
    with pytest.raises(TypeError, match=r"does not take the batch \(2 by position\).*; if it computes no loss"):
        train_step(DATA, LABEL)
    with pytest.raises(TypeError, match=r"columns first$"):
        make_train_step(forward_fn, sgd(), 2, eager=True)(DATA)
