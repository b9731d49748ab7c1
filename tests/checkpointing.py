"""What test_checkpoint.py trains and saves, and what it runs in processes of their own: `python checkpointing.py COMMAND [ARGUMENTS]`."""
import resource
import signal
import sys
from hashlib import sha256

import mindspore as ms
import numpy as np
from conftest import MLP, batches, mean_loss, tensors
from mindspore import Tensor, amp, nn

from ms_accum import Accumulator, load_checkpoint, make_train_step, save_checkpoint
from ms_accum import checkpoint as checkpoint_module

LOSS = nn.CrossEntropyLoss()
OPTIMIZERS = {"Momentum": lambda parameters: nn.Momentum(parameters, nn.exponential_decay_lr(0.1, 0.9, 100, 1, 1), 0.9),
              "Adam": lambda parameters: nn.Adam(parameters, 0.01),
              "SGD": lambda parameters: nn.SGD(parameters, 0.1)}


def build(optimizer="Momentum", dtype=ms.float32, reduction="mean", hidden=5, accumulate_step=3, scaler=False, strategy="fused", **options):
    """A network, its accumulator and a train step `(x, y) -> loss`, of which those of a sum are driven by hand."""
    network = MLP(hidden=hidden).to_float(dtype)
    for parameter in network.trainable_params():
        parameter.set_dtype(dtype)
    acc = Accumulator(OPTIMIZERS[optimizer](network.trainable_params()), accumulate_step, 0.5, reduction=reduction, **options)

    if reduction == "mean":
        loss_scaler = amp.DynamicLossScaler(1024, 2, 2) if scaler else None
        return network, acc, make_train_step(mean_loss(network), acc, strategy=strategy, loss_scaler=loss_scaler)
    grad_fn = ms.value_and_grad(mean_loss(network), None, acc.optimizer.parameters)

    def train_step(x, y):
        loss, grads = grad_fn(x, y)
        return loss, acc(grads)

    return network, acc, ms.jit(train_step)


def train(acc, train_step, first, last):
    """Microbatches `first` to `last` of a fixed sequence; the fourth holds a NaN, unless that would end everything."""
    for i, (x, y) in enumerate(batches([4] * 12)[first:last], first):
        if i == 3 and acc.on_nonfinite != "apply":
            x[0, 0] = np.nan
        train_step(*tensors(x, y))


def state(network, acc):
    """Every bit of state by name."""
    return {name: p.asnumpy().tobytes() for name, p in checkpoint_module._entries(network, acc).items()}


def train_randomly(path, resumed, mask_given):
    """The digest of a network after 8 microbatches, saved or resumed after 6; dropped is by a given mask, or by nn.Dropout."""
    ms.set_seed(1)
    network, dropout = MLP(hidden=16), nn.Dropout(p=0.5).set_train()

    def forward_fn(x, y, mask):
        hidden = ms.ops.tanh(network.first(x))
        return LOSS(network.second(hidden * mask if mask_given else dropout(hidden)), y)

    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 4, reduction="mean")
    grad_fn = ms.value_and_grad(forward_fn, None, acc.optimizer.parameters)
    for i in range(load_checkpoint(path, network, acc) if resumed else 0, 8):
        rng = np.random.default_rng([1, i])
        batch = tensors(rng.normal(size=(4, 6)), rng.integers(0, 3, 4))
        acc(grad_fn(*batch, Tensor(2.0 * (rng.random((4, 16)) < 0.5), ms.float32))[1], 4)
        if i == 5 and not resumed:
            save_checkpoint(path, network, acc, extra=i + 1)
    return sha256(b"".join(state(network, acc).values())).hexdigest()


def resume(resumed):
    """Print digests: of a compiled training that was saved or resumed in mid-window, and of two random ones, op by op."""
    network, acc, train_step = build()
    if resumed:
        assert load_checkpoint("c.ckpt", network, acc) == {"done": 5}
    else:
        train(acc, train_step, 0, 5)
        save_checkpoint("c.ckpt", network, acc, extra={"done": 5})
    train(acc, train_step, 5, 11)
    print(sha256(b"".join(state(network, acc).values())).hexdigest())
    print(train_randomly("mask.ckpt", resumed, True), train_randomly("layer.ckpt", resumed, False))


def fill_disk(*paths):
    """Save where no file can grow further, as on a full disk."""
    network, acc, _ = build(hidden=3000)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    for path in paths:
        try:
            save_checkpoint(path, network, acc, extra="new")
        except OSError:
            print("OSError")


def save_numbers(network, acc, numbers, *paths):
    """Save each number in the network and in `extra`."""
    for number in numbers:
        network.first.bias.set_data(network.first.bias * 0 + number)
        for path in paths:
            save_checkpoint(path, network, acc, extra=number)
        yield number


def load_number(path, network, acc):
    """The number in a checkpoint, which is one of a single save."""
    number = load_checkpoint(path, network, acc)
    assert float(network.first.bias.asnumpy()[0]) == number, "parts of two checkpoints"
    return number


def save_on(path, resumed):
    """Save numbers without end."""
    network, acc, _ = build(hidden=2000)
    first = load_number(path, network, acc) if resumed else 0
    print("ready", first, flush=True)
    for number in save_numbers(network, acc, range(first + 1, 10**9), path):
        print(number, flush=True)


def save_at_once(start, *paths):
    """Save ten numbers as soon as somebody says so."""
    network, acc, _ = build(hidden=500)
    print("ready", flush=True)
    sys.stdin.readline()
    list(save_numbers(network, acc, range(int(start), int(start) + 10), *paths))


if __name__ == "__main__":
    {"run": lambda: resume(False), "resume": lambda: resume(True), "fill_disk": fill_disk, "save_on": lambda path: save_on(path, False),
     "resume_save_on": lambda path: save_on(path, True), "save_at_once": save_at_once}[sys.argv[1]](*sys.argv[2:])
