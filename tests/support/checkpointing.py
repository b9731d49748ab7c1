"""What test_checkpoint.py trains and saves, also in other processes: `python checkpointing.py PATH MICROBATCHES`."""
import os
import sys
from hashlib import sha256

from conftest import MLP, batches, mean_loss, tensors
from mindspore import amp, nn
from pages import recipe

from ms_accum import Accumulator, load_checkpoint, make_train_step, save_checkpoint

OPTIMIZERS = {"Momentum": lambda weights: nn.Momentum(weights, nn.exponential_decay_lr(0.1, 0.9, 100, 1, 1), 0.9),
              "Adam": lambda weights: nn.Adam(weights, 0.01)}
BATCHES = batches([4, 6, 4, 4, 6, 6, 6, 4, 4, 6, 4, 6])


def build(optimizer="Momentum", hidden=5, accumulate_step=3, reduction="mean", scaler=False, average=False, **options):
    """A network, its accumulator, and the train step that feeds it."""
    network = MLP(hidden=hidden)
    weights = network.trainable_params()
    acc = Accumulator(OPTIMIZERS[optimizer](weights), accumulate_step, 0.5, reduction=reduction,
                      loss_scaler=amp.DynamicLossScaler(1024, 2, 2) if scaler else None,
                      after_update=recipe("train-step", "MovingAverage")(weights, 0.5) if average else None, **options)
    return network, acc, make_train_step(mean_loss(network), acc) if reduction == "mean" else None


def train(train_step, first, last):
    """Microbatches `first` to `last` of a fixed sequence."""
    for i in range(first, last):
        train_step(*tensors(*BATCHES[i % len(BATCHES)]))


def state(network, acc):
    """Every bit of state."""
    parameters = (*network.get_parameters(), *acc.optimizer.get_parameters(), *acc.state.values())
    return [p.asnumpy().tobytes() for p in parameters]


def run(path, last):
    """Train to microbatch `last`, saved and printed after each, from the file if there is one. Return a digest."""
    network, acc, train_step = build(hidden=300)
    for i in range(load_checkpoint(path, network, train_step) if os.path.exists(path) else 0, last):
        train(train_step, i, i + 1)
        save_checkpoint(path, network, train_step, extra=i + 1)
        print(i + 1, flush=True)
    return sha256(b"".join(state(network, acc))).hexdigest()


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
