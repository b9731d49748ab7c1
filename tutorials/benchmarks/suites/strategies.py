"""Ours and the ways in use, on four networks, with microbatches whole and cut."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from case import Case
from harness import Group, Suite, referee_of

WAYS = ("undivided", "ms_accum", "tutorial", "boost", "parallel-nn")
# Length of the window and pieces of a microbatch where memory is taken.
WEIGHED = (4, 8)


def groups(quick: bool, scratch: Path) -> list[Group]:
    """A microbatch that can be cut is 8 times as large; who cannot cut takes it whole. Memory is taken of N = 4."""
    every = [(n, cut) for cut in (1, 8) for n in (1, 4, 16)]
    # 128 pieces of a larger network take seconds.
    most = [(n, cut) for n, cut in every if n * cut <= 32]
    networks = [
        # A CNN of 16 channels and 2 blocks takes 5.8 s for 32 pieces: Conv2d is slow on CPU.
        ("MLP", "mlp-784-512-512-10", 32, 2048, every), ("CNN", "cnn-8x1", 2, 64, most),
        ("transformer", "transformer-384x6", 4, 32, most), ("ViT", "vit-192x6", 2, 0, [(4, 1), WEIGHED])]
    if quick:
        networks = [
            ("MLP", "mlp-784-32-32-10", 4, 512, [(4, 1), WEIGHED]), ("CNN", "cnn-8x1", 1, 0, [(2, 8)]),
            ("transformer", "transformer-32x1", 1, 0, [(2, 8)]), ("ViT", "vit-32x1", 1, 0, [(2, 8)])]
    found = []
    for label, network, batch, piece, windows in networks:
        for n, cut in windows:
            case = Case(network, cut * batch, n, cut=cut)
            names = (*WAYS, *(["pytorch-eager"] if label == "MLP" else []), *(["ms_accum-pieces"] if cut > 1 else []))
            group = Group(f"{label}, N = {n}, {f'cut in {cut}' if cut > 1 else 'whole'}", case, names, ("tutorial",),
                          0.02 if quick else 0.25, referee=referee_of(case))
            found.append(replace(group, small=cut, piece=piece) if (n, cut) == WEIGHED and piece else group)
    return found


SUITE = Suite("ours and the ways in use, microbatches whole and cut", groups, rounds=5, quick_rounds=2)
