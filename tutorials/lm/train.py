"""Train a byte-level transformer of 1 M parameters on documents of different lengths, with accumulated gradients.

Microbatches hold different numbers of bytes. Each is weighted by its bytes, so the update equals that of the undivided
batch. After each epoch, the bits per byte of other documents are measured. It takes a minute on 2 cores.

  python train.py                          on a quarter of the documentation that comes with Python
  python train.py --text book.txt          on a file, whose documents are separated by empty lines
  python train.py --compare                also with the mean of means: what does this common mistake cost?
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
from network import BitsPerByte, Network, count_bytes, count_one, generate
from tqdm import tqdm

import ms_accum

# --- options ----------------------------------------------------------------------------------------------------------

parser = argparse.ArgumentParser(usage="%(prog)s [options]", description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add("--text", default="excerpt", metavar="FILE", help="(default: %(default)s, of pydoc_data.topics)")
add("--epochs", type=int, default=3, help="(default: %(default)s)")
add("--batch-size", type=int, default=16, help="rows of up to 64 bytes in a microbatch (default: %(default)s)")
add("--accumulate-step", type=int, default=2, help="microbatches between two updates (default: %(default)s)")
add("--lr", type=float, default=0.001, help="learning rate of Adam (default: %(default)s)")
add("--clip-norm", type=float, default=1.0, help="of the accumulated gradient (default: %(default)s)")
add("--seed", type=int, default=42, help="of the initial weights and the order of the text (default: %(default)s)")
add("--zero", type=int, choices=(0, 1, 2), default=0, help="divide among ranks: 1 the optimizer's state, 2 and buffers")
add("--compare", action="store_true", help="train again with the mean of means: all microbatches have the same weight")
add("--save", metavar="FILE.safetensors", help="write a checkpoint after each epoch")
add("--resume", metavar="FILE.safetensors", help="continue from a checkpoint, with the options of that run")
add("--plot", metavar="FILE.png", help="draw loss and validation; needs matplotlib")
args = parser.parse_args()
for name in ("epochs", "batch_size", "accumulate_step", "lr", "clip_norm"):
    if not 0 < vars(args)[name] < inf:
        parser.error(f"argument --{name.replace('_', '-')}: got {vars(args)[name]}, expected a number above 0")
if args.compare and (args.save or args.resume):
    parser.error("argument --compare: it trains twice; leave out --save and --resume")
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

# --- training ---------------------------------------------------------------------------------------------------------

try:
    text, validation = load(args.text, args.seed)
except (ValueError, OSError) as error:
    parser.error(f"argument --text: {error}")
print(f"{len(text):,} rows of text to train on, {len(validation):,} to validate on; an update takes "
      f"{args.batch_size} x {args.accumulate_step} microbatches x {ranks} ranks = "
      f"{args.batch_size * args.accumulate_step * ranks:,} rows")


def validate(bits):
    """Return the bits per byte of the validation documents."""
    batches = validation.microbatches(np.arange(len(validation)), args.batch_size)
    found = [float(bits(*map(Tensor, validation.batch(rows)))) for rows in batches]
    return float(np.average(found, weights=[validation.count(rows) for rows in batches]))


run = {name: vars(args)[name] for name in ("text", "batch_size", "lr", "clip_norm", "seed")}
histories, weights = {}, {"token mean": count_bytes, "mean of means": count_one}
for label in list(weights)[:1 + args.compare]:
    if args.compare:
        print(label)
    network = Network(args.seed)
    forward_fn = BitsPerByte(network)  # the mean over the bytes of a microbatch
    parameters = network.trainable_params()
    optimizer = nn.Adam(ms_accum.shard_parameters(parameters) if args.zero else parameters, args.lr)
    # The loss is a mean over bytes, so the weight of a microbatch is its number of bytes.
    train_step = ms_accum.make_train_step(
        forward_fn, optimizer, args.accumulate_step, weight_fn=weights[label], clip_norm=args.clip_norm,
        reducer=ms_accum.DataParallel(zero=args.zero))  # on one device, a reducer does nothing
    windows = []  # a row of the log for each update of an epoch
    train_step.on_update(ms_accum.WindowLog(windows.append))
    history = {"run": run, "loss": [], "validation": []}
    if args.resume:
        try:
            history = ms_accum.load_checkpoint(args.resume, network, train_step)
            if history["run"] != run:
                raise ValueError(f"{args.resume} is from a run with {history['run']}, but this run has {run}")
        except (ValueError, OSError) as error:
            parser.error(str(error))
    if len(history["validation"]) >= args.epochs:
        print(f"finished: {history['validation'][-1]:.4f} bits per byte; to train on, give more --epochs")

    bits = ms.jit(forward_fn)
    for epoch in range(len(history["validation"]) + 1, args.epochs + 1):
        # Dealt out one by one, so that a window of all ranks holds the same rows as a longer window of one process.
        microbatches = text.epoch(args.batch_size, args.seed, epoch)
        mine = microbatches[rank::ranks]
        windows.clear()
        for _ in tqdm(train_step.epoch(map(text.batch, mine)), f"epoch {epoch}/{args.epochs}", len(mine), False,
                      unit=" microbatches", disable=None):  # a bar on a terminal
            pass  # reading each loss would wait for the device; the log reads those of windows
        history["loss"] += [window["loss"] for window in windows]
        history["validation"].append(validate(bits))
        if rank == 0:  # which has the log
            loss = np.average([window["loss"] for window in windows], weights=[window["weight"] for window in windows])
            print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  "
                  f"validation {history['validation'][-1]:.4f} bits per byte", flush=True)
        if args.save:
            ms_accum.save_checkpoint(args.save, network, train_step, extra=history)
    histories[label] = history
    print("the network writes:", generate(ms.jit(network), 80, args.seed))

if args.plot and rank == 0:
    plot(args.plot, histories)
