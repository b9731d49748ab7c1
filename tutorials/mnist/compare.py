"""Train the network of train.py twice: with accumulated gradients, and with MindSpore alone, each window as one batch.

  python compare.py                      is the difference between the parameters of both that of rounding in float64?
  python compare.py --plot compare.png   draw losses and accuracies; needs matplotlib
  msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --join=True --log_dir=ranks --tail_worker_log=0 \\
      python compare.py --zero 1            on two ranks; if they say nothing for a minute, give another free port
"""
import argparse
import os

import mindspore as ms
import numpy as np
from data import load
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from train import Network, accuracy

import ms_accum

parser = argparse.ArgumentParser(usage="%(prog)s [options]", description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add("--data", default="embedded", metavar="{embedded,full,DIR}", help="DIR holds train/ and test/ of MNIST")
add("--epochs", type=int, default=3, help="(default: %(default)s)")
add("--batch-size", type=int, default=32, help="digits in a microbatch (default: %(default)s)")
add("--accumulate-step", type=int, default=2, help="microbatches between two updates (default: %(default)s)")
add("--lr", type=float, default=0.01, help="learning rate (default: %(default)s)")
add("--momentum", type=float, default=0.0, help="(default: %(default)s)")
add("--seed", type=int, default=42, help="of the weights and the order of the digits (default: %(default)s)")
add("--zero", type=int, choices=(0, 1, 2), default=0, help="divide among ranks: 1 the optimizer's state, 2 and buffers")
add("--plot", metavar="FILE.png", help="draw losses and accuracies")
args = parser.parse_args()

ms_accum.avoid_busy_waiting()  # faster on few CPU cores
rank, ranks = 0, 1
if "MS_WORKER_NUM" in os.environ:  # started by msrun
    init()
    rank, ranks = get_rank(), get_group_size()
digits, test_digits = load(args.data)


def build(shard=list):
    """Return the network, its loss as a function of images and labels, and the optimizer."""
    ms.set_seed(args.seed)
    # In float32, trainings that round differently drift apart. Ranks on CPU cannot exchange float64.
    network = Network(ms.float64 if ranks == 1 else ms.float32)

    def forward_fn(images, labels):
        return ops.cross_entropy(network(images), labels)

    return network, forward_fn, nn.Momentum(shard(network.trainable_params()), args.lr, args.momentum)


def accumulated():
    """Train with windows; return the network, the loss of each update, and the accuracy after each epoch."""
    network, forward_fn, optimizer = build(ms_accum.shard_parameters if args.zero else list)
    reducer = ms_accum.DataParallel(zero=args.zero)  # on one device, it does nothing
    train_step = ms_accum.make_train_step(forward_fn, optimizer, args.accumulate_step, reducer=reducer)
    losses, accuracies = [], []
    train_step.on_update(ms_accum.WindowLog(lambda row: losses.append(row["loss"])))  # on rank 0
    for epoch in range(1, args.epochs + 1):
        # Dealt out one by one, so that a window of all ranks holds the digits of one batch below.
        microbatches = digits.epoch(args.batch_size, args.seed, epoch)[rank::ranks]
        for _ in train_step.epoch(map(digits.batch, microbatches)):
            pass
        accuracies.append(accuracy(network, test_digits))
    return network, losses, accuracies


def undivided():
    """Train with batches as large as the windows, and without ms_accum; return the same."""
    network, forward_fn, optimizer = build()
    grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)
    losses, accuracies = [], []
    for epoch in range(1, args.epochs + 1):
        for rows in digits.epoch(args.batch_size * args.accumulate_step * ranks, args.seed, epoch):
            loss, gradients = grad_fn(*map(Tensor, digits.batch(rows)))
            optimizer(gradients)
            losses.append(float(loss))
        accuracies.append(accuracy(network, test_digits))
    return network, losses, accuracies


def plot(path, histories):
    """Draw the loss of each update and the accuracy after each epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")  # without pyplot, no display is needed
    left, right = figure.subplots(1, 2)
    # If both agree, the second lies on the first: dashes leave the first visible.
    for (label, (_, losses, accuracies)), style in zip(histories.items(), ("-", "--")):
        left.plot(range(1, len(losses) + 1), losses, style, linewidth=1, label=label)
        right.plot(range(1, len(accuracies) + 1), accuracies, f"o{style}", label=label)
    left.set(xlabel="update", ylabel="training loss (cross entropy in nats)")
    right.set(xlabel="epoch", ylabel="test accuracy (%)")
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


histories = {"accumulated": accumulated(), "undivided": undivided()}
(network, _, accuracies), (plain, _, accuracies_undivided) = histories.values()
difference = max(np.abs(one.asnumpy() - other.asnumpy()).max()
                 for one, other in zip(network.get_parameters(), plain.get_parameters()))
if rank == 0:
    print(f"accumulated: accuracy {accuracies[-1]:.2f} %; undivided: {accuracies_undivided[-1]:.2f} %; the largest "
          f"difference between parameters is {difference:.1e}")
    if args.plot:
        plot(args.plot, histories)
