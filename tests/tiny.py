"""A small text and a small network."""
import numpy as np
from mindspore import nn

from ms_accum.lm import data, network
from ms_accum.lm.settings import Settings
from ms_accum.lm.train import Task

WORDS = ("gradient", "window", "of", "a", "the", "batch", "is", "not", "mean", "loss", "and")
# Op by op where a test is not about graphs: each graph takes seconds to compile.
FEW = Settings(batch_size=4, accumulate_step=3, epochs=2, mode="pynative")


def text(documents=20, seed=0):
    """Documents of 1 to 20 words, separated by empty lines."""
    rng = np.random.default_rng(seed)
    return "\n\n".join(f"{i} " + " ".join(rng.choice(WORDS, rng.integers(1, 21))) for i in range(documents)).encode()


def split(documents=20):
    """`text` as a Text."""
    return data.split(data.documents_of(text(documents)), 42)


def shrink(monkeypatch):
    """Make networks of one layer with 16 features."""
    for name, value in (("FEATURES", 16), ("LAYERS", 1), ("HEADS", 2)):
        monkeypatch.setattr(network, name, value)


def with_sgd(monkeypatch):
    """Train with SGD: Adam's first update has the size of the learning rate, however large a gradient is."""
    monkeypatch.setattr(nn, "Adam", nn.SGD)


def task(**settings):
    """A Task on the small text."""
    return Task(split(), Settings(**{**vars(FEW), **settings}), "few")
