"""Train the network of MindSpore's gradient accumulation tutorial on handwritten digits, with accumulated gradients.

  python train.py                          on 10,000 digits, which are in the folder digits
  python train.py --data full              on all 60,000, downloaded once
  python train.py --compare                also without accumulation: are the parameters equal?
  python train.py --save run.safetensors   to continue after kill -9, add --resume run.safetensors
  msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --join=True --log_dir=ranks --tail_worker_log=0 \\
      python train.py --zero 1             on two ranks; if they say nothing for a minute, give another free port
"""
import argparse
import os
import sys
from math import inf

import mindspore as ms
import numpy as np
from data import load
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init
from tqdm import tqdm

import ms_accum

# --- options ----------------------------------------------------------------------------------------------------------

parser = argparse.ArgumentParser(usage="%(prog)s [options]", description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add("--data", default="embedded", metavar="{embedded,full,DIR}", help="DIR holds train/ and test/ of MNIST")
add("--epochs", type=int, default=3, help="(default: %(default)s)")
add("--batch-size", type=int, default=32, help="digits in a microbatch (default: %(default)s)")
add("--accumulate-step", type=int, default=2, help="microbatches between two updates (default: %(default)s)")
add("--lr", type=float, default=0.01, help="learning rate (default: %(default)s)")
add("--momentum", type=float, default=0.0, help="(default: %(default)s)")
add("--seed", type=int, default=42, help="of the initial weights and the order of the digits (default: %(default)s)")
add("--zero", type=int, choices=(0, 1, 2), default=0, help="divide among ranks: 1 the optimizer's state, 2 and buffers")
add("--compare", action="store_true", help="train again with MindSpore alone, each window as one batch, in float64")
add("--save", metavar="FILE.safetensors", help="write a checkpoint after each epoch")
add("--resume", metavar="FILE.safetensors", help="continue from a checkpoint, with the options of that run")
add("--plot", metavar="FILE.png", help="draw loss and accuracy; needs matplotlib")
args = parser.parse_args()
for name in ("epochs", "batch_size", "accumulate_step", "lr"):
    if not 0 < vars(args)[name] < inf:
        parser.error(f"argument --{name.replace('_', '-')}: got {vars(args)[name]}, expected a number above 0")
if args.compare and (args.save or args.resume or "MS_WORKER_NUM" in os.environ):
    parser.error("argument --compare: it trains twice on one device; leave out --save, --resume and msrun")
for path in filter(None, (args.save, args.plot)):
    if not os.path.isdir(os.path.dirname(path) or "."):
        parser.error(f"{path} is in a folder that does not exist; make the folder first")
if args.plot:
    from plot import plot

ms_accum.avoid_busy_waiting()  # faster on few CPU cores
rank, ranks = 0, 1
if "MS_WORKER_NUM" in os.environ:  # started by msrun
    init()
    rank, ranks = get_rank(), get_group_size()
    sys.stdout = sys.stdout if rank == 0 else open(os.devnull, "w", encoding="utf-8")

# --- network ----------------------------------------------------------------------------------------------------------


class Network(nn.Cell):
    """The tutorial's network. It takes images, uint8 `(n, 28, 28)`, and returns logits, float32 `(n, 10)`."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
        self.flatten = nn.Flatten()
        first, second, last = (nn.Dense(*size, dtype=dtype) for size in ((28 * 28, 512), (512, 512), (512, 10)))
        self.dense_relu_sequential = nn.SequentialCell(first, nn.ReLU(), second, nn.ReLU(), last)

    def construct(self, images):
        pixels = (self.flatten(images).astype(ms.float32) / 255 - 0.1307) / 0.3081
        return self.dense_relu_sequential(pixels.astype(self.dtype)).astype(ms.float32)


def build():
    """Return a network, its loss as a function of images and labels, and the optimizer."""
    ms.set_seed(args.seed)
    # In float32, trainings with and without accumulation round differently, and differ more and more.
    network = Network(ms.float64 if args.compare else ms.float32)
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(images, labels):
        return loss_fn(network(images), labels)  # the mean; never divided by the number of microbatches

    parameters = ms_accum.shard_parameters(network.trainable_params()) if args.zero else network.trainable_params()
    return network, forward_fn, nn.Momentum(parameters, args.lr, args.momentum)  # nn.SGD takes no float64


def accuracy(network, test):
    return 100 * float(np.mean(network(Tensor(test.images)).asnumpy().argmax(axis=1) == test.labels))


# --- training with accumulated gradients ------------------------------------------------------------------------------

network, forward_fn, optimizer = build()
reducer = ms_accum.DataParallel(zero=args.zero)  # on one device, it does nothing
train_step = ms_accum.make_train_step(forward_fn, optimizer, args.accumulate_step, reducer=reducer)
windows = []  # a row of the log for each update of an epoch
train_step.on_update(ms_accum.WindowLog(windows.append))
run = {name: vars(args)[name] for name in ("data", "batch_size", "lr", "momentum", "seed")}
history = {"run": run, "loss": [], "accuracy": []}
try:
    digits, test = load(args.data)
    if args.resume:
        history = ms_accum.load_checkpoint(args.resume, network, train_step)
        if history["run"] != run:
            raise ValueError(f"{args.resume} is from a run with {history['run']}, but this run has {run}")
except (ValueError, OSError) as error:
    parser.error(str(error))
print(f"{len(digits):,} digits to train on, {len(test):,} to test on; an update takes {args.batch_size} x "
      f"{args.accumulate_step} microbatches x {ranks} ranks = {args.batch_size * args.accumulate_step * ranks:,}")
if len(history["accuracy"]) >= args.epochs:
    print(f"finished: accuracy {history['accuracy'][-1]:.2f} %; to train on, give more --epochs")
for epoch in range(len(history["accuracy"]) + 1, args.epochs + 1):
    # Dealt out one by one, so that a window of all ranks holds the same digits as a longer window of one process.
    microbatches = digits.epoch(args.batch_size, args.seed, epoch)
    mine = microbatches[rank::ranks]
    windows.clear()
    for _ in tqdm(train_step.epoch(map(digits.batch, mine)), f"epoch {epoch}/{args.epochs}", len(mine), False,
                  unit=" microbatches", disable=None):  # a bar on a terminal
        pass  # reading each loss would wait for the device; the log reads those of windows
    history["loss"] += [window["loss"] for window in windows]
    history["accuracy"].append(accuracy(network, test))
    if rank == 0:  # which has the log
        loss = np.average([window["loss"] for window in windows], weights=[window["weight"] for window in windows])
        print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  accuracy {history['accuracy'][-1]:.2f} %", flush=True)
    if args.save:
        ms_accum.save_checkpoint(args.save, network, train_step, extra=history)

# --- the same without accumulation, and the plot ----------------------------------------------------------------------

histories = {"accumulated": history}
if args.compare:
    plain, forward_fn, optimizer = build()
    grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)
    histories["undivided"] = history = {"loss": [], "accuracy": []}
    for epoch in range(1, args.epochs + 1):
        for rows in digits.epoch(args.batch_size * args.accumulate_step, args.seed, epoch):
            loss, gradients = grad_fn(*map(Tensor, digits.batch(rows)))
            optimizer(gradients)
            history["loss"].append(float(loss))
        history["accuracy"].append(accuracy(plain, test))
    pairs = zip(network.get_parameters(), plain.get_parameters())
    print(f"undivided batches: accuracy {history['accuracy'][-1]:.2f} %; the largest difference between parameters is "
          f"{max(np.abs(a.asnumpy() - b.asnumpy()).max() for a, b in pairs):.1e}")
if args.plot and rank == 0:
    plot(args.plot, histories)
