"""What the notebooks share: digits, a small network, comparisons with the undivided batch, peak memory, and figures.

Importing it keeps MindSpore's log quiet and lets its threads sleep while they wait.
"""
from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

os.environ["GLOG_v"] = "4"  # MindSpore looks for the source files of a notebook's cells, and logs an error about each

import matplotlib.pyplot as plt
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset

from ms_accum import avoid_busy_waiting
from ms_accum.batch_size.planning import Plan
from ms_accum.mnist.data import EMBEDDED, load

avoid_busy_waiting()
_mnist = load("embedded")
digits, test_digits = _mnist.train, _mnist.test  # 10,000 and 2,000 digits of MNIST

_SENTENCES = """
One.
Stop here.
Not yet.
Go on.
Add up what you have, and wait.
The buffer fills, the weights rest.
Four small steps, one large one.
A mean is not a mean of means.
Gradient accumulation trades time for memory, and it changes nothing else if it is done with care.
A mean over sentences gives each token of a short sentence more weight than each token of a long one.
No parameter changes in the middle of a window, and all parameters change when the window is closed.
The last window of an epoch is a window like any other, and it has to be closed at the end of the epoch.
""".strip().splitlines()

REFERENCE = {"color": "0.7", "linewidth": 6}
EXACT = {"color": "C2", "linestyle": "--"}
MISTAKE = {"color": "C3"}


# --- data and network ------------------------------------------------------------------------------------------------


def batch(first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return digits as images, float32 `(n, 1, 28, 28)` from 0 to 1, and labels, int32 `(n,)`."""
    return batch_of(slice(first, last))


def batch_of(indices: slice | np.ndarray) -> tuple[Tensor, Tensor]:
    """Return any digits, as `batch` does."""
    return Tensor(digits.images[indices, None].astype(np.float32) / 255), Tensor(digits.labels[indices])


def dataset(batch_size: int, samples: int = len(digits)) -> ms.dataset.Dataset:
    """Return the first digits, shuffled, in batches."""
    ms.dataset.config.set_seed(1)
    images = digits.images[:samples, None].astype(np.float32) / 255
    return NumpySlicesDataset((images, digits.labels[:samples]), ["image", "label"], shuffle=True).batch(batch_size)


def test_dataset(batch_size: int) -> ms.dataset.Dataset:
    """Return all 2,000 test digits, in batches."""
    images = test_digits.images[:, None].astype(np.float32) / 255
    return NumpySlicesDataset((images, test_digits.labels), ["image", "label"], shuffle=False).batch(batch_size)


def unpack_digits() -> list[Path]:
    """Unpack the digits to `MNIST_Data/train` and `MNIST_Data/test`, where `MnistDataset` finds them. Return the files."""
    for packed in EMBEDDED.glob("*/*.gz"):
        unpacked = Path("MNIST_Data", packed.parent.name, packed.stem)
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        unpacked.write_bytes(gzip.decompress(packed.read_bytes()))
    return sorted(Path().glob("MNIST_Data/*/*"))


def sentences() -> tuple[Tensor, Tensor]:
    """Return twelve sentences, sorted by length: characters and the next characters, int32 `(12, length)`; -1 is padding."""
    length = max(map(len, _SENTENCES)) - 1
    text = np.full((len(_SENTENCES), length + 1), -1)
    for row, sentence in zip(text, _SENTENCES):
        row[:len(sentence)] = list(sentence.encode())
    return Tensor(np.maximum(text[:, :-1], 0), ms.int32), Tensor(text[:, 1:], ms.int32)


def mlp() -> nn.Cell:
    """Return a network of two dense layers, with the same initial parameters each time."""
    ms.set_seed(1)
    return nn.SequentialCell(nn.Flatten(), nn.Dense(784, 64), nn.Tanh(), nn.Dense(64, 10))


def forward_of(network: nn.Cell) -> Callable:
    """Return the forward function of a network: `(image, label) -> mean loss`, in float32."""
    loss_fn = nn.CrossEntropyLoss()

    def forward_fn(image: Tensor, label: Tensor) -> Tensor:
        return loss_fn(network(image).astype(ms.float32), label)

    return forward_fn


def accuracy(network: nn.Cell) -> float:
    """Return how many of the 2,000 test digits a network recognises, in per cent."""
    images = Tensor(test_digits.images[:, None].astype(np.float32) / 255)
    return 100 * float((network(images).asnumpy().argmax(axis=1) == test_digits.labels).mean())


# --- comparison with the undivided batch -----------------------------------------------------------------------------


def flat(tensors: Iterable[Tensor]) -> np.ndarray:
    """Return all numbers of some tensors as one long float64 vector."""
    return np.concatenate([tensor.asnumpy().astype(np.float64).ravel() for tensor in tensors])


def values(network: nn.Cell) -> np.ndarray:
    """Return all parameters of a network as one long vector."""
    return flat(network.trainable_params())


def gradient_of(forward_fn: Callable, network: nn.Cell) -> Callable:
    """Return `(*batch) -> gradient` of the mean loss as one long vector, in bare MindSpore."""
    grad_fn = ms.value_and_grad(forward_fn, None, network.trainable_params())
    return lambda *batch: flat(grad_fn(*batch)[1])


def off(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the relative error of a vector: the norm of the difference, divided by the norm of `wanted`."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def train_undivided(network: nn.Cell, batches: Iterable[tuple], learning_rate: float) -> list[float]:
    """Train on undivided batches with SGD, in bare MindSpore. Return the losses."""
    optimizer = nn.SGD(network.trainable_params(), learning_rate)
    grad_fn = ms.value_and_grad(forward_of(network), None, optimizer.parameters)

    @ms.jit
    def train_step(image: Tensor, label: Tensor) -> Tensor:
        loss, grads = grad_fn(image, label)
        optimizer(grads)
        return loss

    return [float(train_step(image, label)) for image, label in batches]


def train_clipped(network: nn.Cell, batches: Iterable[tuple], learning_rate: float, clip_norm: float) -> list[float]:
    """Train on undivided batches with SGD and clipping, in bare MindSpore. Return the norms of the gradients before clipping."""
    optimizer = nn.SGD(network.trainable_params(), learning_rate)
    grad_fn = ms.value_and_grad(forward_of(network), None, optimizer.parameters)
    norms = []
    for image, label in batches:
        _, grads = grad_fn(image, label)
        norms.append(float(np.linalg.norm(flat(grads))))
        optimizer(tuple(grad * min(1, clip_norm / norms[-1]) for grad in grads))
    return norms


# --- the noise of a linear network's gradient, in NumPy --------------------------------------------------------------


def true_noise_scale() -> tuple[float, np.ndarray]:
    """Return the noise scale of a linear network, from the gradients of all single digits, and its weight `(10, 784)`."""
    pixels, weight = _pixels(), np.zeros((10, 784))
    for _ in range(5):  # a little training
        weight -= 0.5 * _errors(weight).T @ pixels / len(pixels)
    errors = _errors(weight)
    signal = _signal(weight)
    noise = ((errors**2).sum(axis=1) * (pixels**2).sum(axis=1)).mean() - signal  # the variance of a single digit's gradient
    return noise / signal, weight


def measured_signal(weight: np.ndarray, order: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Return batch sizes, and the share of signal in the gradient of a batch for each."""
    sizes, shares = [2**i for i in range(13)], []
    pixels, errors = _pixels(), _errors(weight)
    for size in sizes:
        batches = [order[first:first + size] for first in range(0, min(8192, 200 * size), size)]
        gradients = [errors[indices].T @ pixels[indices] / size for indices in batches]
        shares.append(_signal(weight) / np.mean([(gradient**2).sum() for gradient in gradients]))
    return sizes, np.array(shares)


def _pixels() -> np.ndarray:
    return digits.images.reshape(-1, 784) / 255.0


def _errors(weight: np.ndarray) -> np.ndarray:
    """Return softmax minus target for each digit: the gradient of its loss with respect to the outputs."""
    outputs = np.exp(_pixels() @ weight.T)
    return outputs / outputs.sum(axis=1, keepdims=True) - np.eye(10)[digits.labels]


def _signal(weight: np.ndarray) -> float:
    """Return the squared norm of the gradient of all digits."""
    return float(((_errors(weight).T @ _pixels() / len(digits))**2).sum())


# --- processes and memory --------------------------------------------------------------------------------------------


def enter_temporary_folder() -> tempfile.TemporaryDirectory:
    """Make a temporary folder the working directory, from which modules are imported, too. It lives as long as the result."""
    folder = tempfile.TemporaryDirectory()
    os.chdir(folder.name)
    sys.path.insert(0, folder.name)
    return folder


def start(script: str, *arguments: object) -> subprocess.Popen:
    """Start a script that can import this file."""
    with open("stderr.txt", "w") as errors:
        return subprocess.Popen([sys.executable, script, *map(str, arguments)], stdout=subprocess.PIPE, stderr=errors, text=True,
                                env=_environment())


def _environment() -> dict[str, str]:
    """Return the environment of a script that can import what this process can, and this file."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent), *filter(None, sys.path)])}


def launch(script: str, ranks: int = 2) -> list[dict[str, np.ndarray]]:
    """Run a script on several ranks with `msrun`. Return what each of them saved, as `{script}{rank}.npz`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = Path(sys.executable).parent
    command = [python / "msrun", f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={port}", "--join=True",
               "--log_dir=logs", script]
    # Op by op, so that every exchange is counted as it happens. Without MS_JIT=0, train steps are compiled.
    environment = {**_environment(), "PATH": f"{python}:{os.environ['PATH']}", "MS_JIT": "0"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} failed: {done.stdout[-3000:]}")
    return [dict(np.load(f"{Path(script).stem}{rank}.npz")) for rank in range(ranks)]


def count_exchanges() -> list[int]:
    """Return a list to which each later `ops.AllReduce` and `ops.AllGather` of this process appends the bytes that it is given."""
    sent: list[int] = []

    def counted(collective: Callable) -> Callable:
        class Counted:
            def __init__(self, *arguments: object, **options: object) -> None:
                self.collective = collective(*arguments, **options)

            def __call__(self, x: Tensor) -> Tensor:
                sent.append(x.nbytes)
                return self.collective(x)

        return Counted

    for name in ("AllReduce", "AllGather"):
        setattr(ops, name, counted(getattr(ops, name)))
    return sent


def printed_losses(process: subprocess.Popen) -> Iterator[tuple[int, float]]:
    """Yield the number and the loss of each microbatch, as a script prints them."""
    for line in process.stdout:
        number, loss = line.split()
        yield int(number), float(loss)


def run_limited(script: str, *arguments: object, limit: int) -> tuple[int, dict[int, int]]:
    """Run a script that calls `report_peak`, and kill it when it holds more than `limit` MiB, as Linux does when memory runs out.

    Returns:
        The exit code, and `{samples: peak memory in MiB}` as the script reported them.
    """
    process = start(script, *arguments)
    while process.poll() is None:
        if _status(process.pid, "VmRSS") > limit:
            process.kill()
        time.sleep(0.005)
    return process.returncode, {int(samples): int(peak) for samples, peak in map(str.split, process.stdout)}


def report_peak(samples: int) -> None:
    """Print how much memory this process has needed at most so far."""
    print(samples, _status("self", "VmHWM"), flush=True)


def _status(process: int | str, field: str) -> int:
    """Return a field of /proc/PID/status in MiB; 0 when the process has ended."""
    with open(f"/proc/{process}/status") as status:
        return next((int(line.split()[1]) // 1024 for line in status if line.startswith(field)), 0)


# --- figures ---------------------------------------------------------------------------------------------------------


def show_digits() -> None:
    """Show the first ten digits."""
    _, axes = plt.subplots(1, 10, figsize=(8, 1))
    for axis, image, label in zip(axes, digits.images, digits.labels):
        axis.imshow(image, cmap="gray_r")
        axis.set_title(label)
        axis.axis("off")


def show_gradients(gradients: dict[str, np.ndarray]) -> None:
    """Show the gradient of the 784 weights of one neuron of `mlp`, for each vector; red and blue are its signs."""
    pictures = [gradient[784:2 * 784].reshape(28, 28) for gradient in gradients.values()]
    largest = max(np.abs(picture).max() for picture in pictures)
    _, axes = plt.subplots(1, len(pictures), figsize=(9, 2))
    for axis, picture, title in zip(axes, pictures, gradients):
        axis.imshow(picture, cmap="RdBu_r", vmin=-largest, vmax=largest)
        axis.set_title(title, fontsize=9)
        axis.axis("off")


def show_memory(whole: dict[int, int], accumulated: dict[int, int], sizes: Sequence[int], limit: int) -> None:
    """Show the peak memory with undivided batches and with microbatches; batches that are missing were killed."""
    where = np.arange(len(sizes))
    plt.figure(figsize=(7, 3))
    plt.bar(where[:len(whole)] - 0.2, whole.values(), 0.4, color="C3", label="undivided batch")
    plt.bar(where[len(whole):] - 0.2, limit, 0.4, color="white", edgecolor="C3", hatch="//", label="undivided batch: killed")
    plt.bar(where + 0.2, [accumulated[size] for size in sizes], 0.4, color="C2", label="microbatches of 64")
    plt.axhline(limit, color="0.5", linestyle="--", label="limit")
    plt.xticks(where, [f"{size:,}" for size in sizes])
    plt.xlabel("digits in an update")
    plt.ylabel("peak memory in MiB")
    plt.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, fontsize="small")


def show_parameter(weights: Sequence[float], counts: Sequence[int], boundaries: Sequence[int]) -> None:
    """Show one parameter and `mini_step` after each microbatch."""
    microbatches = range(1, len(weights) + 1)
    _, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 3.5))
    above.step(microbatches, weights, where="post")
    above.plot(boundaries, [weights[i - 1] for i in boundaries], "o", label="boundary")
    above.set_ylabel("one weight")
    above.legend()
    below.bar(microbatches, counts)
    below.set(ylabel="mini_step", xlabel="microbatch", xticks=microbatches)


def lines(xlabel: str, ylabel: str, log: bool = False, ticks: dict | None = None, **curves: tuple) -> None:
    """Draw curves. The keyword of a curve is its style: `reference`, `exact`, `mistake`, or any other word.

    Args:
        xlabel: Label of the x axis.
        ylabel: Label of the y axis.
        log: Whether the y axis is logarithmic.
        ticks: `{value: text}` for the y axis.
        **curves: `(label, y)`, with x from 1 on, or `(label, x, y)`.
    """
    styles = {"reference": REFERENCE, "exact": EXACT, "mistake": MISTAKE}
    plt.figure(figsize=(7, 3))
    for style, (label, *x, y) in curves.items():
        x = x[0] if x else range(1, len(y) + 1)
        plt.plot(x, y, label=label, marker="." if len(y) <= 64 else None, **styles.get(style, {}))
    plt.xlabel(xlabel)
    plt.ylabel(ylabel)
    if log:
        plt.yscale("log")
    if ticks:
        plt.yticks(list(ticks), list(ticks.values()))
    plt.legend()


def bars(ylabel: str, names: Iterable[str], mistake: tuple, exact: tuple, log: bool = False) -> None:
    """Draw two bars for each name: `mistake=(label, values)` in red and `exact=(label, values)` in green."""
    names = list(names)
    where = np.arange(len(names))
    plt.figure(figsize=(7, 3))
    for shift, colour, (label, heights) in ((-0.2, "C3", mistake), (0.2, "C2", exact)):
        plt.bar(where + shift, list(heights), 0.4, color=colour, label=label)
    if log:
        plt.yscale("log")
        plt.ylim(1e-9, 30)
    plt.xticks(where, names, fontsize="small")
    plt.ylabel(ylabel)
    plt.legend(ncols=2)


def show_windows(ends: dict[str, Sequence[int]], wrong: tuple[str, int]) -> None:
    """Show windows as bars, by the microbatches that they end with; `wrong` names the window that is drawn in red."""
    _, axes = plt.subplots(figsize=(7, 1.6))
    for row, (name, boundaries) in enumerate(ends.items()):
        for window, (start, end) in enumerate(zip([0, *boundaries], boundaries)):
            colour = "C3" if (name, window) == wrong else f"C{window % 2 * 9}"
            axes.barh(row, end - start, left=start, color=colour, edgecolor="white")
            axes.text((start + end) / 2, row, f"{end - start}", ha="center", va="center", color="white")
    axes.set(yticks=range(len(ends)), yticklabels=ends, xticks=range(0, 15, 2), xlabel="microbatches")


def show_directions(vectors: dict[str, np.ndarray]) -> None:
    """Show three vectors as arrows in the plane of the first two: a wrong one, a right one, and one for comparison."""
    wrong, right, _ = vectors.values()
    along = right / np.linalg.norm(right)
    across = wrong - (wrong @ along) * along
    across /= np.linalg.norm(across)
    plt.figure(figsize=(6, 3))
    for (name, vector), colour, width in zip(vectors.items(), ("C3", "C2", "0.7"), (0.008, 0.008, 0.004)):
        plt.quiver(0, 0, vector @ along, vector @ across, color=colour, width=width, angles="xy", scale_units="xy", scale=1, label=name)
    plt.axis([0, 1.3, -0.1, 0.8])
    plt.legend()


def show_parts(sizes: Sequence[Sequence[int]]) -> None:
    """Show the microbatches of two ranks, with a colour for each window of four."""
    _, axes = plt.subplots(figsize=(7, 1.8))
    for rank, of_rank in enumerate(sizes):
        for i, size in enumerate(of_rank):
            axes.barh(1 - rank, size / 32 * 0.94, left=i, color=f"C{i // 4}", alpha=0.5)
            axes.text(i + size / 32, 1 - rank, size, va="center", ha="right" if size == 32 else "left", fontsize=8)
    axes.set(yticks=[0, 1], yticklabels=["rank 1", "rank 0"], xticks=range(12))
    axes.set_xlabel("microbatches of an epoch (a colour for each window)")


def show_traffic(labels: Sequence[str], panels: dict[str, dict[str, float]]) -> None:
    """Show horizontal bars, one panel for each quantity."""
    _, axes = plt.subplots(1, len(panels), figsize=(8, 2), sharey=True, squeeze=False)
    for axis, (quantity, heights) in zip(axes[0], panels.items()):
        axis.barh(labels, heights.values(), color=["C3" if label == "by hand" else "C2" for label in labels])
        axis.set_xlabel(quantity)


def show_stacked(names: Sequence[str], parts: dict[str, np.ndarray]) -> None:
    """Show one stacked bar for each name."""
    plt.figure(figsize=(6, 2.5))
    bottom = np.zeros(len(names))
    for label, heights in parts.items():
        plt.bar(names, heights, bottom=bottom, label=label)
        bottom += heights
    plt.legend()


def show_errors(errors: dict[str, float]) -> None:
    """Show relative errors as horizontal bars, red above 1 %."""
    plt.figure(figsize=(6, 2))
    plt.barh(list(errors), list(errors.values()), color=["C3" if error > 0.01 else "C2" for error in errors.values()])
    plt.gca().invert_yaxis()
    plt.xscale("log")
    plt.xlim(1e-8, 10)
    plt.xlabel("largest relative difference of a gradient")


def show_plan(plan: Plan, batch_size: int) -> float:
    """Show the trials of a plan. Return the MiB that the undivided batch would take, on the line through the others."""
    completed = sorted((trial.microbatch, trial.peak / 2**20) for trial in plan.trials if trial.ended == "completed")
    beyond = [trial.microbatch for trial in plan.trials if not trial.fits]
    slope, start = np.polyfit(*zip(*completed), 1)
    limit = plan.memory_limit / 2**20
    plt.figure(figsize=(6, 2.5))
    plt.plot([0, batch_size], [start, start + slope * batch_size], "C2:", label="the line through them")
    plt.plot(*zip(*completed), "C2o", label="fits")
    plt.plot(beyond, [limit] * len(beyond), "C3^", label="stopped at the limit")
    plt.axhline(limit, color="C3", linestyle="--", linewidth=1)
    plt.xlabel("microbatch")
    plt.ylabel("peak memory in MiB")
    plt.ylim(0, 1.3 * limit)
    plt.legend(loc="lower right")
    return float(start + slope * batch_size)


def show_signal(sizes: Sequence[int], shares: np.ndarray, curve: np.ndarray, noise_scale: float) -> None:
    """Show the share of signal in the gradient of a batch, measured and as the noise scale predicts it."""
    plt.figure(figsize=(6, 2.5))
    plt.semilogx(sizes, shares, "ko", label="measured")
    plt.semilogx(sizes, curve, "C2", label="1 / (1 + noise scale / batch)")
    plt.axvline(noise_scale, color="C2", linestyle="--", label="noise scale")
    plt.xlabel("digits in a batch")
    plt.ylabel("share of signal")
    plt.legend()
