"""Ours and every other way: on an MLP in small microbatches, and on three networks in large ones, whole and cut."""
from __future__ import annotations

from pathlib import Path

from case import Case
from harness import Group, Suite, referee_of

WAYS = ("undivided", "ms_accum", "tutorial", "boost", "parallel-nn")
OTHERS = ("ms_accum-by-hand", "mindcv", "pytorch-eager", "pytorch-compiled", "jax-multisteps", "jax-scan")


def groups(quick: bool, scratch: Path) -> list[Group]:
    """Windows of four. A large microbatch can be cut in eight; who cannot cut takes it whole, and memory is taken."""
    seconds = 0.02 if quick else 0.25
    small = Case("mlp-784-32-32-10" if quick else "mlp-784-512-512-10", 4 if quick else 32, 4)
    found = [Group("MLP, N = 4, whole", small, (*WAYS, *OTHERS), "tutorial", seconds, referee=referee_of(small))]
    # A CNN of 16 channels and 2 blocks takes 5.8 s for 32 pieces: Conv2d is slow on CPU.
    networks = [("MLP", "mlp-784-32-32-10", 4, 512)] if quick else [
        ("MLP", "mlp-784-512-512-10", 32, 2048), ("CNN", "cnn-8x1", 2, 64), ("transformer", "transformer-384x6", 4, 32)]
    for label, network, batch, piece in networks:
        case = Case(network, 8 * batch, 4, cut=8)
        found.append(Group(f"{label}, N = 4, cut in 8", case, (*WAYS, "ms_accum-pieces"), "tutorial", seconds,
                           referee=referee_of(case), small=8, piece=piece))
    return found


SUITE = Suite("ours and every other way, time and memory", groups, rounds=5)
