"""tutorials/lm: what the script learns and prints, and how it resumes; its schedule, its network and its data."""
import re
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor
from support import tiny
from support.scripts import module, run, run_here, saved

import ms_accum

data, network, train = (module("lm", name) for name in ("data", "network", "train"))
PADDING, WIDTHS = data.PADDING, data.WIDTHS
SMALL = ("--text", "text", "--batch-size", "4", "--epochs", "2", "--lr", "0.01")


@pytest.fixture
def small(monkeypatch, uncompiled):
    """20 documents and a small network; op by op, because a graph takes seconds to compile."""
    tiny.shrink(monkeypatch)
    Path("text").write_bytes(tiny.text())


def test_it_learns_prints_and_is_resumed_bit_identically(small, capsys, monkeypatch):
    """The resumed run is one that ended after its first epoch. Control: what is resumed is not the end."""
    run_here("lm", *SMALL, "--save", "whole.safetensors")
    *lines, last = capsys.readouterr().out.splitlines()
    epochs = [line for line in lines if line.startswith("epoch")]
    assert all(re.fullmatch(r"epoch \d/2  validation \d\.\d{4} bits per byte", line) for line in epochs)
    first, second = (float(re.search(r"validation (\S+)", line)[1]) for line in epochs)
    assert second < first < 8
    assert re.fullmatch("the network writes: .{40,}", last)
    with monkeypatch.context() as patch:
        patch.setattr("ms_accum.save_checkpoint", dying)
        with pytest.raises(KeyboardInterrupt):
            run_here("lm", *SMALL, "--save", "run.safetensors")
    before = saved("run.safetensors")
    capsys.readouterr()
    run_here("lm", *SMALL, "--save", "run.safetensors", "--resume", "run.safetensors")
    assert capsys.readouterr().out.splitlines()[-2:] == [epochs[1], last]
    assert saved("run.safetensors") == saved("whole.safetensors") != before


def dying(*arguments, save=ms_accum.save_checkpoint):
    """Save, and end the run."""
    save(*arguments)
    raise KeyboardInterrupt


def test_the_rate_rises_linearly_and_falls_in_half_a_cosine():
    rates = train.schedule(110, 0.5, 0.1)
    np.testing.assert_allclose(rates[:11], np.arange(1, 12) / 22)
    np.testing.assert_allclose(rates[11:], (1 + np.cos(np.pi * np.arange(99) / 99)) / 4)
    assert [len(train.schedule(updates, 0.5, 0.1)) for updates in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.slow
def test_the_defaults_reach_what_the_page_says():
    """On another processor, the last digits differ."""
    printed = run("lm")
    assert float(re.findall(r"validation (\S+)", printed)[2]) == pytest.approx(3.28, abs=0.02)
    updates = re.findall(r"^update (\d+)/141  loss \S+  rate \S+  norm \S+  [\d,]+ bytes/s$", printed, re.MULTILINE)
    assert updates == [str(number) for number in range(10, 141, 10)]


# --- network ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(small):
    """Four rows of 17, 64, 40 and 0 bytes."""
    tokens = np.random.default_rng(0).integers(0, 256, (4, 64)).astype(np.int32)
    for row, length in enumerate((17, 64, 40, 0)):
        tokens[row, length:] = PADDING
    return tokens


def test_a_byte_is_predicted_from_the_bytes_before_it_alone(tokens):
    one = network.Network(3)
    logits = one(Tensor(tokens)).asnumpy()
    changed = tokens.copy()
    changed[:, 20] = 65
    moved = np.abs(one(Tensor(changed)).asnumpy() - logits).max(axis=(0, 2))
    assert moved[:21].max() < 1e-6
    assert moved[21:].min() > 1e-5
    shorter = one(Tensor(tokens[:, :32])).asnumpy()
    assert np.abs(shorter - logits[:, :32]).max() < 1e-5, "a row may be padded more or less"


def bits_in_numpy(logits, tokens):
    """-log2 p of every byte, in float64."""
    logits = logits.astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows, places = np.nonzero(tokens != PADDING)
    return -log_p[rows, places, tokens[rows, places]] / np.log(2)


def test_the_loss_is_the_mean_over_bytes_in_bits(tokens):
    one = network.Network(3)
    bits = bits_in_numpy(one(Tensor(tokens)).asnumpy(), tokens)
    assert float(network.BitsPerByte(one)(Tensor(tokens))) == pytest.approx(bits.mean(), abs=1e-5)
    assert int(network.count_bytes(Tensor(tokens))) == len(bits) == 17 + 64 + 40


# --- data -------------------------------------------------------------------------------------------------------------


def test_a_text_is_split_at_its_empty_lines_and_one_document_in_ten_is_held_out_by_the_seed():
    letters = [f"{letter} one\ntwo".encode() for letter in "abcdefghi"]
    Path("text").write_bytes(b"\r\n\r\n".join([b"", *letters, b"\xff\x00 \n", b" \t\n", letters[0]]))
    train, validation = data.load("text", 1)
    rows = {bytes(row) for text in (train, validation) for row in text.rows[:-1]}
    assert rows == {*(letter + b"\n" for letter in letters), b"\xff\x00 \n"}
    assert (len(train), len(validation)) == (9, 1)
    others = {bytes(data.load("text", seed)[1].rows[0]) for seed in range(9)}
    assert len(others) > 2
    excerpt = data.load("excerpt", 42)[0]
    assert 50_000 < excerpt.count(np.arange(len(excerpt))) < 100_000


def test_documents_are_cut_into_rows_and_lose_no_byte():
    documents = [bytes(range(n)) for n in (1, 32, 33, 64, 65, 200)]
    rows = data.rows_of(documents)
    assert [len(row) for row in rows.rows] == [1, 32, 33, 64, 64, 1, 64, 64, 64, 8, 0]
    assert (len(rows), rows.count(np.arange(10))) == (10, sum(map(len, documents)))
    assert rows.count(np.array([1, 9, -1])) == 40
    (tokens,) = rows.batch(np.array([5, 0, -1]))
    assert (tokens.shape, tokens.dtype) == ((3, WIDTHS[0]), np.int32)
    assert tokens[0, :2].tolist() == [64, PADDING]
    assert (tokens[1, 0], (tokens != PADDING).sum()) == (0, 2)
    assert rows.batch(np.array([0, 2]))[0].shape == (2, WIDTHS[1])


@pytest.mark.parametrize("size", [4, 10**9])
def test_a_microbatch_has_rows_of_one_width_and_all_have_one_size(size):
    Path("text").write_bytes(tiny.text())
    rows = data.load("text", 42)[0]
    cut = rows.epoch(size, 42, 1)
    assert {rows.batch(taken)[0].shape for taken in cut} == {(min(size, len(rows)), width) for width in WIDTHS}
    taken = np.concatenate(cut)
    assert sorted(taken[taken >= 0].tolist()) == list(range(len(rows)))
    assert [each.tolist() for each in cut] == [each.tolist() for each in rows.epoch(size, 42, 1)]
    assert size > 4 or [each.tolist() for each in cut] != [each.tolist() for each in rows.epoch(size, 42, 2)]
