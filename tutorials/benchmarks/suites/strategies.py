"""Ours and the ways in use, on three networks, in windows of four microbatches, whole and cut in eight."""
from __future__ import annotations

from pathlib import Path

from case import Case
from harness import Group, Suite, referee_of

WAYS = ("undivided", "ms_accum", "tutorial", "boost", "parallel-nn")


def groups(quick: bool, scratch: Path) -> list[Group]:
    """A microbatch that can be cut is 8 times as large; who cannot cut takes it whole, and memory is taken of it."""
    # A CNN of 16 channels and 2 blocks takes 5.8 s for 32 pieces: Conv2d is slow on CPU.
    networks = [
        ("MLP", "mlp-784-512-512-10", 32, 2048), ("CNN", "cnn-8x1", 2, 64), ("transformer", "transformer-384x6", 4, 32)]
    if quick:
        networks = [
            ("MLP", "mlp-784-32-32-10", 4, 512), ("CNN", "cnn-8x1", 1, 0), ("transformer", "transformer-32x1", 1, 0)]
    found = []
    for label, network, batch, piece in networks:
        for cut in (1, 8):
            case = Case(network, cut * batch, 4, cut=cut)
            names = (*WAYS, *(["pytorch-eager"] if label == "MLP" else []), *(["ms_accum-pieces"] if cut > 1 else []))
            found.append(Group(
                f"{label}, N = 4, {f'cut in {cut}' if cut > 1 else 'whole'}", case, names, ("tutorial",),
                0.02 if quick else 0.25, referee=referee_of(case),
                small=cut if piece and cut > 1 else 0, piece=piece if cut > 1 else 0))
    return found


SUITE = Suite("ours and the ways in use, microbatches whole and cut", groups, rounds=5, quick_rounds=2)
