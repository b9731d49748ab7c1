"""Train a byte-level transformer of 1 M parameters on documents of different lengths, with accumulated gradients.

A script to be copied: warm-up and cosine, clipping, evaluation, save and resume, several ranks. Microbatches are
weighted by their bytes, so the update equals that of the undivided batch. It takes a minute on 2 cores.

  python train.py                          on a quarter of the documentation that comes with Python
  python train.py --text book.txt          on a file, whose documents are separated by empty lines
  python train.py --save run.safetensors   after each epoch; to go on after kill -9, add --resume run.safetensors
  msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --join=True --log_dir=ranks --tail_worker_log=0 \\
      python train.py                      on two ranks; if they say nothing for a minute, give another free port
"""
import argparse
import os
from math import cos, pi

import mindspore as ms
import numpy as np
from data import load
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init
from network import BitsPerByte, Network, count_bytes, generate

import ms_accum


def options():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", default="excerpt", metavar="FILE", help="(default: %(default)s, of pydoc_data.topics)")
    add("--epochs", type=int, default=3, help="(default: %(default)s)")
    add("--batch-size", type=int, default=16, help="rows of up to 64 bytes in a microbatch (default: %(default)s)")
    add("--accumulate-step", type=int, default=2, help="microbatches between two updates (default: %(default)s)")
    add("--lr", type=float, default=0.002, help="largest learning rate of Adam (default: %(default)s)")
    add("--warmup", type=float, default=0.1, help="share of the updates in which it rises (default: %(default)s)")
    add("--clip-norm", type=float, default=1.0, help="of the accumulated gradient (default: %(default)s)")
    add("--seed", type=int, default=42, help="of the weights and the order of the text (default: %(default)s)")
    add("--save", metavar="FILE.safetensors", help="write a checkpoint after each epoch")
    add("--resume", metavar="FILE.safetensors", help="go on from a checkpoint, which rank 0 reads for all")
    return parser.parse_args()


def schedule(updates, largest, warmup):
    """Return the learning rate of each update: a linear rise in the first `warmup` of them, then half a cosine to 0."""
    rise = max(1, round(warmup * updates))
    return [largest * min((i + 1) / rise, (1 + cos(pi * max(0, i - rise) / max(1, updates - rise))) / 2)
            for i in range(updates)]


def main():
    """Train, measure the bits per byte of other documents after each epoch, and generate some text at the end."""
    args = options()
    ms_accum.avoid_busy_waiting()  # faster on few CPU cores
    rank, ranks = 0, 1
    if "MS_WORKER_NUM" in os.environ:  # started by msrun
        init()
        rank, ranks = get_rank(), get_group_size()
    text, validation = load(args.text, args.seed)
    held_out = validation.microbatches(np.arange(len(validation)), args.batch_size)
    microbatches = len(text.epoch(args.batch_size, args.seed, 1))
    updates = ms_accum.updates_of(args.accumulate_step * ranks, microbatches, args.epochs)
    network = Network(args.seed)
    forward_fn = BitsPerByte(network)  # the mean over the bytes of a microbatch
    optimizer = nn.Adam(network.trainable_params(), schedule(updates, args.lr, args.warmup))

    def log(row):
        if row["update_step"] % 10 == 0:
            print(f"update {row['update_step']}/{updates}  loss {row['loss']:.4f}  rate {row['learning_rate']:.1e}  "
                  f"norm {row['grad_norm']:.2f}  {row['per_second']:,.0f} bytes/s", flush=True)

    # The loss is a mean over bytes, so the weight of a microbatch is its number of bytes.
    train_step = ms_accum.make_train_step(forward_fn, optimizer, args.accumulate_step, weight_fn=count_bytes,
                                          clip_norm=args.clip_norm, reducer=ms_accum.DataParallel())
    train_step.on_update(ms_accum.WindowLog(log))  # WindowLog("windows.csv") writes a file
    if args.resume:
        ms_accum.load_checkpoint(args.resume, network, train_step)

    network.set_train()
    for epoch in range(train_step.epochs + 1, args.epochs + 1):
        # Dealt out one by one, so that a window of all ranks holds the same rows as a longer window of one process.
        mine = text.epoch(args.batch_size, args.seed, epoch)[rank::ranks]
        for _ in train_step.epoch(map(text.batch, mine)):
            pass  # the loss of a microbatch; `float(loss)` waits until the device has computed it
        bits = train_step.evaluate(map(validation.batch, held_out[rank::ranks]))
        print(f"epoch {epoch}/{args.epochs}  validation {bits:.4f} bits per byte", flush=True)
        if args.save:
            ms_accum.save_checkpoint(args.save, network, train_step)

    network.set_train(False)
    print("the network writes:", generate(ms.jit(network), 80, args.seed))


if __name__ == "__main__":
    main()
