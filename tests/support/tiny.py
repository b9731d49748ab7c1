"""A small text and a small network."""
import numpy as np

from support.scripts import module

network = module("lm", "network")
WORDS = ("gradient", "window", "of", "a", "the", "batch", "is", "not", "mean", "loss", "and")


def text(documents=20, seed=0):
    """Documents of 1 to 20 words, separated by empty lines."""
    rng = np.random.default_rng(seed)
    return "\n\n".join(f"{i} " + " ".join(rng.choice(WORDS, rng.integers(1, 21))) for i in range(documents)).encode()


def shrink(monkeypatch):
    """Make networks of one layer with 16 features."""
    for name, value in (("FEATURES", 16), ("LAYERS", 1), ("HEADS", 2)):
        monkeypatch.setattr(network, name, value)
