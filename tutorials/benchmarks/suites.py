"""What each suite compares: groups of contestants on one case."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import oracle
from case import Case, EpochCase, samples

FLOOR = ("floor", "floor-branch")
LIMITS = ("write-only", "add-only", "update-only", "loop-add-only", "one-buffer", "one-buffer-mean")
OURS = ("split", "split-in-step")
WAYS = ("undivided", "split", "tutorial", "boost", "parallel-nn")
CUTTER = "split-in-step"
MEMORY = ("undivided", "split-in-step", "unrolled", "parallel-nn", "split", "tutorial")
# Of the suite ascend; "one-buffer" shows what it is when all gradients wait for each other.
ASCEND, CONTROL = ("undivided", "tutorial", "boost", "parallel-nn", "split", "split-in-step"), "one-buffer"
MINDSPORE = (*FLOOR, "forward", *LIMITS, *OURS, "bare", "undivided", "unrolled", "tutorial", "boost", "parallel-nn",
             "mindcv-style", "mindone-style")
PEERS = ("pytorch-eager", "pytorch-compiled", "jax-multisteps", "jax-scan")
# The ranks of this one exchange nothing, and are judged by their own samples.
ALONE = "alone"
# Of the suite strategies: length of the window and pieces of a microbatch where memory is taken.
WEIGHED = (4, 8)
EXCHANGES = ("window", "microbatch", "shard")
# A network that NumPy's oracle does not know is judged by its undivided batch.
REFEREE = "undivided"
# What contestants train on before their parameters are compared.
WINDOWS = 3
# To choose from where a window is long: the more samples, the likelier is one at a kink.
SEEDS = range(5)

Referee = Callable[[int], list[np.ndarray]]


@dataclass(frozen=True)
class Group:
    """Contestants that are compared with each other.

    Attributes:
        name: Unique in its suite.
        case: The case, as what its class is made of.
        contestants: By name.
        base: What the others are held against; of several, the one with the lowest median.
        seconds: How long the base shall take for a round's microbatches.
        microbatches: In a round; 0: as many as take `seconds`.
        piece: For memory: samples in a large microbatch; 0: memory is not taken.
        small: For memory: samples in a small microbatch; 0: the case's.
        sizes: For the dry run: samples in a microbatch, the smallest and three on a line.
        referee: `(windows) -> parameters`; None: the contestant `REFEREE` is.
    """

    name: str
    case: dict
    contestants: tuple[str, ...]
    base: tuple[str, ...]
    seconds: float = 0.25
    microbatches: int = 0
    piece: int = 0
    small: int = 0
    sizes: tuple[int, ...] = ()
    referee: Referee | None = None


def mlp(quick: bool, digits: Path) -> list[Group]:
    """Every contestant on one MLP."""
    case = Case("mlp-784-32-32-10" if quick else "mlp-784-512-512-10", 32)
    return [_timed("MLP, N = 4", case, (*MINDSPORE, *PEERS), quick)]


def memory(quick: bool, digits: Path) -> list[Group]:
    """Growth of peak RSS from a batch of 16 samples to one of 16,384, in 8 pieces, and of ever more pieces of the same size."""
    network, piece = ("mlp-784-32-32-32-10", 1024) if quick else ("mlp-784-512-512-512-10", 2048)
    groups = [_weighed("8 pieces", Case(network, 2, 8), MEMORY, piece)]
    return groups + [_weighed(f"N = {n}", Case(network, 2, n), OURS, piece) for n in ((16,) if quick else (1, 4, 16, 64))]


def scaling(quick: bool, digits: Path) -> list[Group]:
    """The cost of a microbatch against the window's length, and on other networks."""
    names = OURS if quick else (*OURS, "tutorial")
    parts = ("add-only", "update-only")
    network = "mlp-784-32-32-10" if quick else "mlp-784-512-512-10"
    groups = [_timed(f"MLP, N = {n}", oracle.clearest(Case(network, 32, n), SEEDS, WINDOWS), (*FLOOR, *parts, *names), quick)
              for n in ((1, 4) if quick else (1, 2, 4, 8, 16, 32, 64))]
    others = [("CNN", "cnn-8x1", 1), ("transformer", "transformer-32x1", 2)] if quick else [
        # A quarter of ResNet-18's channels: at 64, a microbatch of 4 takes 9 s (Conv2d on CPU: 440 ms, PyTorch's 1 ms).
        ("CNN", "cnn-16x2", 2), ("transformer", "transformer-384x6", 4)]
    names = (REFEREE, "floor", "split") if quick else (REFEREE, *FLOOR, *names)
    return groups + [_timed(f"{label}, N = 4", Case(other, batch), names, quick) for label, other, batch in others]


def strategies(quick: bool, digits: Path) -> list[Group]:
    """Graphs scheduled by the host, and the ways in use; microbatches whole and cut in 8.

    A microbatch that can be cut is 8 times as large; who cannot cut takes it whole. Of N = 4 memory is taken, too.
    """
    every = [(n, cut) for cut in (1, 8) for n in (1, 4, 16)]
    # 128 pieces of a larger network take seconds.
    most = [(n, cut) for n, cut in every if n * cut <= 32]
    networks = [("MLP", "mlp-784-32-32-10", 4, 512, [(4, 1), WEIGHED]), ("CNN", "cnn-8x1", 1, 0, [(2, 8)]),
                ("transformer", "transformer-32x1", 1, 0, [(2, 8)]), ("ViT", "vit-32x1", 1, 0, [(2, 8)])] if quick else [
        # A CNN of 16 channels and 2 blocks takes 5.8 s for 32 pieces (see scaling).
        ("MLP", "mlp-784-512-512-10", 32, 2048, every), ("CNN", "cnn-8x1", 2, 64, most),
        ("transformer", "transformer-384x6", 4, 32, most), ("ViT", "vit-192x6", 2, 0, [(4, 1), WEIGHED])]
    groups = []
    for label, network, batch, piece, windows in networks:
        names = (*WAYS, "pytorch-eager") if label == "MLP" else WAYS
        for n, cut in windows:
            case = Case(network, cut * batch, n, cut=cut)
            if label == "MLP":
                case = oracle.clearest(case, SEEDS, WINDOWS)
            group = _timed(f"{label}, N = {n}, {f'cut in {cut}' if cut > 1 else 'whole'}", case,
                           (*names, CUTTER) if cut > 1 else names, quick, ("tutorial",))
            groups.append(replace(group, small=cut, piece=piece) if (n, cut) == WEIGHED and piece else group)
    return groups


def skipping(quick: bool, digits: Path) -> list[Group]:
    """What it costs to look for NaN and infinity; "split" twice, to show what two processes of the same code differ by."""
    cases = [("MLP", "mlp-784-32-32-10", 32), ("CNN", "cnn-8x1", 1)] if quick else [
        ("MLP", "mlp-784-512-512-10", 32), ("CNN", "cnn-16x2", 2), ("transformer", "transformer-384x6", 4)]
    names = ("split", "split-again", "skip-window", "skip-microbatch")
    return [_timed(f"{label}, N = 4", Case(network, batch), names if label == "MLP" else (REFEREE, *names), quick, ("split",))
            for label, network, batch in cases]


def mnist(quick: bool, digits: Path) -> list[Group]:
    """A whole epoch of the reference run against the tutorial's own loop and PyTorch."""
    case = EpochCase(str(digits))
    images = np.fromfile(digits / "train" / "train-images-idx3-ubyte", np.uint8, offset=16).reshape(-1, 784)
    labels = np.fromfile(digits / "train" / "train-labels-idx1-ubyte", np.uint8, offset=8)
    window = (images[:case.window] / 255 - 0.1307) / 0.3081

    def referee(windows: int) -> list[np.ndarray]:
        return oracle.trained(case.mlp, window, labels[:case.window], windows)

    names = ("reference", "tutorial-loop", "tutorial-loop-blocking", "pytorch-dataset", "pytorch-tensors")
    return [Group("an epoch, N = 2", asdict(case), names, ("reference",), microbatches=-(-len(labels) // case.batch), referee=referee)]


def distributed(quick: bool, digits: Path) -> list[Group]:
    """Ranks that exchange each window, each microbatch, or nothing."""
    network = "mlp-784-32-32-10" if quick else "mlp-784-512-512-10"
    groups = []
    for ranks in (1, 2) if quick else (1, 2, 4):
        for n in (1, 4) if quick else (1, 8):
            case = oracle.clearest(Case(network, 32, n, ranks=ranks), SEEDS, WINDOWS)
            names = (ALONE,) if ranks == 1 else (ALONE, *EXCHANGES)
            groups.append(Group(f"{ranks} rank{'s' * (ranks > 1)}, N = {n}", asdict(case), names, (ALONE,),
                                microbatches=8 if quick else 24, referee=_oracle(case)))
    return groups


def ascend(quick: bool, digits: Path) -> list[Group]:
    """Peak memory of a window of 8 microbatches on Ascend, in a dry run; float32, Adam.

    The undivided batch, `parallel.nn` and "split-in-step" get the window as one batch; the latter two cut it in 8.
    """
    networks = [
        ("MLP", "mlp-784-512-512-10", 2048), ("CNN", "cnn-64x2", 32), ("ViT", "vit-192x6", 64),
        # Wide and of few blocks: each block takes time to compile, and adds nothing to figures for each parameter.
        ("transformer, 10 M", "transformer-384x6", 64), ("transformer, 350 M", "transformer-2048x7", 96)]
    return [Group(label, asdict(Case(network, 1, 8, optimizer="Adam")), (*ASCEND, CONTROL) if label == "MLP" else ASCEND, (),
                  sizes=(1, size, size * 3 // 2, size * 2)) for label, network, size in networks[:1 if quick else None]]


SUITES = {"mlp": mlp, "memory": memory, "scaling": scaling, "strategies": strategies,
          "skipping": skipping, "distributed": distributed, "mnist": mnist, "ascend": ascend}
ROUNDS = {"mlp": 30, "memory": 3, "scaling": 12, "strategies": 5, "skipping": 30, "distributed": 12, "mnist": 7, "ascend": 1}
QUICK_ROUNDS = {"mlp": 3, "memory": 1, "scaling": 2, "strategies": 2, "skipping": 2, "distributed": 1, "mnist": 1, "ascend": 1}


def _timed(name: str, case: Case, contestants: tuple[str, ...], quick: bool, base: tuple[str, ...] = FLOOR) -> Group:
    return Group(name, asdict(case), contestants, base, seconds=0.02 if quick else 0.25, referee=_oracle(case))


def _weighed(name: str, case: Case, contestants: tuple[str, ...], piece: int) -> Group:
    base = (REFEREE,) if REFEREE in contestants else ()
    return Group(name, asdict(case), contestants, base, piece=piece, referee=_oracle(case))


def _oracle(case: Case) -> Referee | None:
    if case.kind != "mlp":
        return None
    return lambda windows: oracle.trained(case, *samples(case, case.window), windows)
