"""The language model: its network, its loss, validation, and the text that it generates."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from support import tiny

from ms_accum.examples.lm import data, network
from ms_accum.examples.lm.data import PADDING, WIDTHS
from ms_accum.examples.lm.network import BitsPerByte, Network, count_bytes, count_one, generate
from ms_accum.examples.lm.train import evaluate
from ms_accum.examples.program import largest_difference


@pytest.fixture
def tokens(monkeypatch):
    """Four rows of 17, 64, 40 and 0 bytes, and small networks."""
    tiny.shrink(monkeypatch)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 64)).astype(np.int32)
    for row, length in enumerate((17, 64, 40, 0)):
        tokens[row, length:] = PADDING
    return tokens


def test_the_network_has_about_a_million_parameters():
    sizes = {p.name: int(p.size) for p in Network(0).get_parameters()}
    assert 0.9e6 < sum(sizes.values()) < 1.1e6
    assert sizes["blocks.0.attention.in_proj_weight"] == 3 * network.FEATURES**2


def test_a_byte_is_predicted_from_the_bytes_before_it_alone(tokens):
    one = Network(3)
    logits = one(Tensor(tokens)).asnumpy()
    changed = tokens.copy()
    changed[:, 20] = 65
    moved = np.abs(one(Tensor(changed)).asnumpy() - logits).max(axis=(0, 2))
    assert moved[:21].max() < 1e-6
    assert moved[21:].min() > 1e-5
    shorter = one(Tensor(tokens[:, :32])).asnumpy()
    assert np.abs(shorter - logits[:, :32]).max() < 1e-5, "a row may be padded more or less"
    assert largest_difference(one, Network(3)) == 0 < 0.01 < largest_difference(one, Network(4))


def bits_in_numpy(logits, tokens):
    """-log2 p of every byte, in float64."""
    logits = logits.astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows, places = np.nonzero(tokens != PADDING)
    return -log_p[rows, places, tokens[rows, places]] / np.log(2)


def test_the_loss_is_the_mean_over_bytes_in_bits_and_validation_counts_every_byte_once(tokens):
    one = Network(3)
    bits = bits_in_numpy(one(Tensor(tokens)).asnumpy(), tokens)
    assert float(BitsPerByte(one)(Tensor(tokens))) == pytest.approx(bits.mean(), abs=1e-5)
    assert int(count_bytes(Tensor(tokens))) == len(bits) == 17 + 64 + 40
    assert (int(count_one(Tensor(tokens))), int(count_one(Tensor(tokens[3:])))) == (1, 0)
    rows = data.split(data.documents_of(tiny.text()), 42)[0]
    batches = [rows.batch(np.array([i]))[0] for i in range(len(rows))]
    expected = np.concatenate([bits_in_numpy(one(Tensor(batch)).asnumpy(), batch) for batch in batches])
    assert len(expected) == rows.size
    assert evaluate(BitsPerByte(one), rows, 4) == pytest.approx(expected.mean(), abs=1e-5)


def test_text_is_generated_by_the_seed_from_one_shape_and_printable(tokens):
    shapes = []

    def logits(tokens):
        """Most likely what follows the byte before in the alphabet."""
        shapes.append(tokens.shape)
        follows = np.zeros((1, WIDTHS[-1], 256), np.float32)
        for place in range(WIDTHS[-1]):
            before = int(tokens[0, place - 1]) if place else 64
            follows[0, place, before + 1 if before < 90 else 10] = 99
        return Tensor(follows)

    assert generate(logits, 80, seed=0).startswith("ABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    assert shapes == [(1, WIDTHS[-1])] * 80
    one = ms.jit(Network(0))
    assert generate(one, 5, 1) == generate(one, 5, 1) != generate(one, 5, 2)
    assert generate(one, 5, 1).isprintable()
