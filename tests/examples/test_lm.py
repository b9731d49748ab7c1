"""tutorials/lm: what the script learns, compares, draws and rejects, and how it resumes; its network and its data."""
import re
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from support import tiny
from support.scripts import module, run, run_here, start

data, network = module("lm", "data"), module("lm", "network")
PADDING, WIDTHS = data.PADDING, data.WIDTHS
SMALL = ("--text", "text", "--batch-size", "4", "--epochs", "2", "--lr", "0.01")


@pytest.fixture
def small(monkeypatch, uncompiled):
    """20 documents and a small network; op by op, because a graph takes seconds to compile."""
    tiny.shrink(monkeypatch)
    Path("text").write_bytes(tiny.text())


def parameters(path):
    """The bytes of all that a checkpoint holds, but for its description."""
    found = ms.load_checkpoint(str(path), format="safetensors")
    return {name: value.asnumpy().tobytes() for name, value in found.items() if name != "ms_accum"}


def test_it_learns_and_prints(small, capsys):
    history = run_here("lm", *SMALL, "--plot", "run.png")["history"]
    assert history["validation"][1] < history["validation"][0] < 8
    first, *epochs, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ rows of text to train on, \d+ to validate on; an update takes 4 x 2 microbatches x 1 "
                        "ranks = 8 rows", first)
    assert len(epochs) == 2
    assert all(re.fullmatch(r"epoch \d/2  loss \d\.\d{4}  validation \d\.\d{4} bits per byte", line) for line in epochs)
    assert last.startswith("the network writes: ")
    assert len(last) > 60
    assert last.isprintable()
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("even", "least", "most"), [(False, 1e-4, 1), (True, 0, 1e-4)])
def test_compare_finds_that_the_mean_of_means_trains_otherwise(small, even, least, most):
    """Unless all texts have one length: then it is the mean over bytes."""
    if even:  # 20 to train on: five full microbatches
        Path("text").write_text("\n\n".join(f"{i:030}" for i in range(22)))
    found = run_here("lm", *SMALL, "--compare")["histories"]
    assert list(found) == ["token mean", "mean of means"]
    losses = [found[label]["loss"] for label in found]
    assert len(losses[0]) == len(losses[1]) >= 6
    assert least <= np.abs(np.subtract(*losses)).max() <= most


def test_it_is_resumed_bit_identically(small, capsys):
    """Control: what is resumed is not the end."""
    run_here("lm", *SMALL, "--epochs", "1", "--save", "run.safetensors")
    before = parameters("run.safetensors")
    history = run_here("lm", *SMALL, "--resume", "run.safetensors", "--save", "run.safetensors")["history"]
    assert history == run_here("lm", *SMALL, "--save", "whole.safetensors")["history"]
    assert parameters("run.safetensors") == parameters("whole.safetensors") != before
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        run_here("lm", *SMALL, "--resume", "run.safetensors", "--seed", "7")
    assert re.search(r"error: run\.safetensors is from a run with .* this run has .*'seed': 7", capsys.readouterr().err)


@pytest.mark.slow  # it compiles graphs of a million parameters, three times
def test_a_killed_run_is_resumed_bit_identically():
    """After kill -9, compiled, as a user runs it."""
    Path("text").write_bytes(tiny.text())
    with start("lm", *SMALL, "--epochs", "100000", "--save", "run.safetensors") as running:
        while not running.stdout.readline().startswith("epoch 2/"):
            assert running.poll() is None, running.stderr.read()
        running.kill()
        *_, last = ["epoch 2/", *re.findall(r"^epoch \d+/", running.stdout.read(), re.MULTILINE)]
    left, epochs = parameters("run.safetensors"), str(int(re.search(r"\d+", last)[0]) + 2)
    resumed = run("lm", *SMALL, "--epochs", epochs, "--resume", "run.safetensors", "--save", "run.safetensors")
    whole = run("lm", *SMALL, "--epochs", epochs, "--save", "whole.safetensors")
    assert resumed.splitlines()[-3:] == whole.splitlines()[-3:]
    assert parameters("run.safetensors") == parameters("whole.safetensors") != left


@pytest.mark.slow
def test_the_defaults_reach_what_the_page_says():
    """On another processor, the last digits differ."""
    validation = re.findall(r"validation (\S+)", run("lm", "--compare"))
    assert float(validation[2]) == pytest.approx(3.2034, abs=0.02)
    assert float(validation[5]) - float(validation[2]) == pytest.approx(0.05, abs=0.03)


@pytest.mark.parametrize(("arguments", "match"), [
    ("--text nowhere", "argument --text: .*No such file or directory: 'nowhere'"),
    ("--text short", "argument --text: short holds 1 different documents, expected at least 10; separate"),
    ("--clip-norm 0", r"argument --clip-norm: got 0\.0, expected a number above 0"),
    ("--compare --resume run.safetensors", "argument --compare: it trains twice; leave out --save and --resume")])
def test_wrong_arguments_are_an_error_in_one_line(arguments, match, small, capsys):
    Path("short").write_text("one paragraph")
    with pytest.raises(SystemExit) as stopped:
        run_here("lm", *SMALL, *arguments.split())
    printed, said = capsys.readouterr()
    assert (stopped.value.code, printed) == (2, "")
    assert re.fullmatch(rf"usage: train.py \[options\]\ntrain.py: error: {match}.*\n", said)


# --- network ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(small):
    """Four rows of 17, 64, 40 and 0 bytes."""
    tokens = np.random.default_rng(0).integers(0, 256, (4, 64)).astype(np.int32)
    for row, length in enumerate((17, 64, 40, 0)):
        tokens[row, length:] = PADDING
    return tokens


def test_the_network_has_about_a_million_parameters():
    assert 0.9e6 < sum(int(p.size) for p in network.Network(0).get_parameters()) < 1.1e6


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
    assert [int(network.count_one(Tensor(some))) for some in (tokens, tokens[3:])] == [1, 0]


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
