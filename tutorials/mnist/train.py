"""Train the network of MindSpore's tutorial on handwritten digits, with accumulated gradients. A script to be copied.

  python train.py                          on 10,000 digits, which are in the folder digits
  python train.py --data full              on all 60,000, downloaded once
  python train.py --save run.safetensors   after each epoch; the same command goes on after kill -9

compare.py holds it against training with undivided batches, on one device or several ranks.
"""
import argparse
import os

import mindspore as ms
import numpy as np
from data import load
from mindspore import Tensor, nn, ops

import ms_accum


def options():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", default="embedded", metavar="{embedded,full,DIR}", help="DIR holds train/ and test/ of MNIST")
    add("--epochs", type=int, default=3, help="(default: %(default)s)")
    add("--batch-size", type=int, default=32, help="digits in a microbatch (default: %(default)s)")
    add("--accumulate-step", type=int, default=2, help="microbatches between two updates (default: %(default)s)")
    add("--lr", type=float, default=0.01, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=42, help="of the weights and the order of the digits (default: %(default)s)")
    add("--save", metavar="FILE.safetensors", help="write a checkpoint after each epoch; go on if it is there")
    return parser.parse_args()


class Network(nn.Cell):
    """Return logits `(n, 10)` of images, uint8 `(n, 28, 28)`."""

    def __init__(self, dtype=ms.float32):
        super().__init__()
        self.dtype = dtype
        self.flatten = nn.Flatten()
        self.layers = nn.SequentialCell(
            nn.Dense(28 * 28, 512, dtype=dtype), nn.ReLU(),
            nn.Dense(512, 512, dtype=dtype), nn.ReLU(),
            nn.Dense(512, 10, dtype=dtype))

    def construct(self, images):
        pixels = self.flatten(images).astype(self.dtype) / 255
        return self.layers((pixels - 0.1307) / 0.3081)  # mean and standard deviation of MNIST


def accuracy(network, digits):
    """Return how many of the digits the network recognises, in percent."""
    network.set_train(False)
    logits = network(Tensor(digits.images)).asnumpy()
    network.set_train()
    return 100 * np.mean(logits.argmax(axis=1) == digits.labels)


def main():
    """Train, and print the accuracy after each epoch."""
    args = options()
    ms_accum.avoid_busy_waiting()  # faster on few CPU cores
    ms.set_seed(args.seed)
    digits, test_digits = load(args.data)
    network = Network()
    optimizer = nn.SGD(network.trainable_params(), args.lr)

    def forward_fn(images, labels):
        return ops.cross_entropy(network(images), labels)  # the mean; never divided by the number of microbatches

    def log(row):
        if row["update_step"] % 50 == 0:
            print(f"update {row['update_step']}  loss {row['loss']:.4f}  {row['per_second']:,.0f} digits/s", flush=True)

    train_step = ms_accum.make_train_step(forward_fn, optimizer, args.accumulate_step)
    train_step.on_update(ms_accum.WindowLog(log))  # WindowLog("windows.csv") writes a file
    if args.save and os.path.exists(args.save):
        ms_accum.load_checkpoint(args.save, network, train_step)

    network.set_train()
    for epoch in range(train_step.epochs + 1, args.epochs + 1):
        microbatches = digits.epoch(args.batch_size, args.seed, epoch)
        for _ in train_step.epoch(map(digits.batch, microbatches)):
            pass  # the loss of a microbatch; `float(loss)` waits until the device has computed it
        print(f"epoch {epoch}/{args.epochs}  accuracy {accuracy(network, test_digits):.2f} %", flush=True)
        if args.save:
            ms_accum.save_checkpoint(args.save, network, train_step)


if __name__ == "__main__":
    main()
