"""`ms-accum mnist` and `ms-accum lm`: what they learn, print, write and refuse, and how they resume."""
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import mindspore as ms
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from mindspore import Tensor
from support import tiny
from support.mnist_files import embedded_set, write

import ms_accum
from ms_accum import __main__ as cli
from ms_accum.examples import program
from ms_accum.examples.lm import train as lm_train
from ms_accum.examples.mnist import fetch
from ms_accum.examples.mnist import train as mnist_train
from ms_accum.examples.mnist.network import Network
from ms_accum.steps.step import TrainStep

# 90 digits in microbatches of 16: five full ones and a ragged one of 10; with windows of 4, an incomplete one of 2.
COMMANDS = {
    "mnist": ["mnist", "--data", "digits", "--batch-size", "16", "--accumulate-step", "4", "--epochs", "2"],
    "lm": ["lm", "--text", "text", "--batch-size", "4", "--epochs", "2", "--lr", "0.01"]}
UNTIMED = ("train_seconds", "test_seconds")


@pytest.fixture(autouse=True)
def _small(monkeypatch, _scratch_folder):
    """90 + 50 digits, 20 documents and a small language model; op by op, because a graph takes seconds to compile."""
    monkeypatch.setenv("MS_JIT", "0")
    tiny.shrink(monkeypatch)
    monkeypatch.setattr(lm_train, "GENERATED", 4)
    write(Path("digits"), embedded_set(90, 50))
    Path("text").write_bytes(tiny.text())


@pytest.fixture
def run(capsys):
    """Run a command in this process: (status, lines of stdout, lines of stderr)."""
    def run_command(name, *arguments):
        status = cli.main([*COMMANDS[name], *arguments])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()
    return run_command


def read(name):
    """The value of a JSON file; NaN and Infinity, which are not JSON, are refused."""
    return json.loads(Path(name).read_text(), parse_constant=pytest.fail)


def untimed(epochs):
    return [{name: value for name, value in epoch.items() if name not in UNTIMED} for epoch in epochs]


def entries(name):
    """All entries of a checkpoint, without its description, which tells of times."""
    return {entry: p.asnumpy().tobytes() for entry, p in ms.load_checkpoint(name, format="safetensors").items()}


def lines_of(name):
    """Patterns of what the next test's run prints."""
    digits = name == "mnist"
    score = r"accuracy \d+\.\d\d %" if digits else r"validation \d\.\d{4} bits per byte"
    return [
        f"versions   ms_accum {ms_accum.__version__}, mindspore {ms.__version__}, numpy {np.__version__}, python 3.*, "
        "device CPU",
        "data       digits: 90 digits to train on, 50 to test on" if digits else
        r"data       text: \d+ bytes to train on, \d+ to validate on; \d\.\d\d bits for a byte by itself",
        "batch      16 x 4 = 64 digits an update" if digits else "batch      4 x 2 = 8 rows an update",
        r"optimizer  momentum, learning rate 0\.1, clipped to norm 5, seed 7",
        *(rf"epoch {i}/9  loss \d\.\d{{4}}  {score}  train \d+\.\d\d s  test \d+\.\d\d s" for i in range(1, 10)),
        *([] if digits else [r"text that the network generates after \d+ s of training: .+"]),
        "wrote run.safetensors", "wrote run.json", "wrote run.png"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_learns_and_prints_and_writes_every_figure_and_option(run, name):
    options = "--epochs 9 --optimizer momentum --clip-norm 5 --seed 7 --json run.json".split()
    status, out, err = run(name, *options, "--lr", "0.1", "--save", "run.safetensors", "--plot", "run.png")
    assert (status, err) == (0, [])
    assert len(out) == len(lines_of(name))
    assert [line for line, pattern in zip(out, lines_of(name)) if not re.fullmatch(pattern, line)] == []
    found = read("run.json")
    assert {**found, **found["epochs"][-1]} == found
    assert [epoch["epoch"] for epoch in found["epochs"]] == list(range(1, 10))
    assert found["versions"].keys() == {"ms_accum", "mindspore", "numpy", "python", "device"}
    used = found["options"]
    assert (used["clip_norm"], used["seed"], used["save"]) == (5, 7, "run.safetensors")
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")
    assert run(name, *options, "--lr", "1e-30", "--epochs", "1")[0] == 0  # control: nothing is learned
    still = read("run.json")
    if name == "lm":
        assert found["validation"] < still["validation"] - 1
    else:
        assert found["accuracy"] > 70 > 30 > still["accuracy"]
        network = Network(1)
        ms.load_param_into_net(network, ms.load_checkpoint("run.safetensors", format="safetensors"))
        assert found["accuracy"] == mnist_accuracy(network)
        # What has not moved has the loss of the initial network, in ragged microbatches too.
        images, labels = mnist_train.load("digits").train.batch(np.arange(90))
        loss = mnist_train.make_forward(Network(7))(Tensor(images), Tensor(labels))
        assert still["loss"] == pytest.approx(float(loss), abs=2e-6)


def mnist_accuracy(network):
    test = mnist_train.load("digits").test
    return 100 * np.mean(network(Tensor(test.images)).asnumpy().argmax(1) == test.labels)


LABELS = {"mnist": ["accumulated", "undivided"], "lm": ["token mean", "mean of means"]}


def all_alike(images, labels):
    """The weight of a microbatch, however many digits are in it."""
    return 1.0


@pytest.mark.parametrize(("name", "mistake", "even", "least", "most"), [
    ("mnist", False, False, 0, 1e-8), ("mnist", True, False, 1e-4, 1),
    ("lm", False, False, 1e-4, 1), ("lm", False, True, 0, 1e-4)])
def test_compare_trains_twice_and_prints_the_difference(run, monkeypatch, name, mistake, even, least, most):
    """Accumulated training is that of the undivided batch, unless microbatches weigh alike.

    With texts of one length, the mean of means is the mean over tokens.
    """
    if mistake:
        monkeypatch.setattr(mnist_train, "make_train_step", partial(mnist_train.make_train_step, weight_fn=all_alike))
    if even:  # 20 to train on: five full microbatches
        Path("text").write_text("\n\n".join(f"{i:030}" for i in range(22)))
    options = "--lr 0.1 --optimizer momentum --clip-norm 0.5".split() if name == "mnist" else ["--epochs", "1"]
    status, out, _ = run(name, "--compare", "--json", "run.json", "--plot", "run.png", *options)
    found = read("run.json")
    both = found, found["compared"]
    assert status == 0
    assert least <= found["largest_parameter_difference"] <= most
    assert both[0]["update_step"] == both[1]["update_step"]
    score = "accuracy {accuracy:.2f} %" if name == "mnist" else "validation {validation:.4f} bits per byte"
    printed = [f"{label:<13}  {score.format(**figures)}" for label, figures in zip(LABELS[name], both)]
    start = out.index("comparison")
    assert [line for line in out[:start] if line in LABELS[name]] == LABELS[name]
    parted = f"largest parameter difference {found['largest_parameter_difference']:.3g}"
    assert out[start + 1:start + 4] == [*printed, parted]


def test_a_run_that_diverges_is_reported_in_valid_json(run):
    status, out, _ = run("mnist", "--lr", "1e30", "--json", "run.json")
    assert status == 0
    assert "loss nan" in out[-2]
    assert read("run.json")["loss"] is None is not read("run.json")["accuracy"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_is_resumed_bit_identically(run, name):
    """Control: before that, the checkpoint holds something else. What a kill leaves: test_checkpoint.py."""
    assert run(name, "--epochs", "1", "--save", "c.safetensors")[0] == 0
    before = entries("c.safetensors")
    status, out, err = run(name, "--resume", "c.safetensors", "--save", "c.safetensors", "--json", "c.json")
    assert (status, err) == (0, [])
    assert "resumed    c.safetensors, saved after epoch 1" in out
    status, whole, _ = run(name, "--save", "whole.safetensors", "--json", "whole.json")
    assert status == 0
    assert untimed(read("c.json")["epochs"]) == untimed(read("whole.json")["epochs"])
    assert entries("c.safetensors") == entries("whole.safetensors") != before
    assert any("wrote c.safetensors" in line for line in out)
    status, out, _ = run(name, "--resume", "c.safetensors", "--save", "other.safetensors")
    assert (status, [line for line in out if "wrote" in line]) == (0, []), "nothing was left to train"
    score, = re.findall(r"^epoch 2/2  (loss .*?)  train ", "\n".join(whole), re.MULTILINE)
    assert f"finished   epoch 2/2  {score}; to train on, give --epochs 3 or more" in out
    assert not any(line.startswith("finished") for line in run(name, "--resume", "c.safetensors", "--epochs", "3")[1])


def test_what_cannot_be_resumed_is_refused(run):
    assert run("mnist", "--save", "c.safetensors", "--epochs", "1")[0] == 0
    assert run("lm", "--save", "lm.safetensors", "--epochs", "1")[0] == 0
    ms.save_checkpoint(Network(42), "plain.safetensors", format="safetensors")
    Path("cut.safetensors").write_bytes(Path("c.safetensors").read_bytes()[:-9])
    Path("run.rank1of2-0123456789abcdef.safetensors").touch()
    for name, path, *options, message in [
        ("mnist", "c.safetensors", "--lr", "0.5", r"c\.safetensors is from a run with lr 0\.01, but this run has 0\.5"),
        ("mnist", "c.safetensors", "--seed", "1", r"from a run with seed 42, but this run has 1"),
        *(("mnist", path, re.escape(path)) for path in (
            "lm.safetensors", "plain.safetensors", "none.safetensors", "run.safetensors", "text")),
        ("mnist", "cut.safetensors", r"cut\.safetensors is (damaged|truncated)")]:
        status, out, err = run(name, "--resume", path, *options)
        assert (status, out, len(err)) == (2, [], 1)
        assert re.search(message, err[0])
    # Control: this may change, and so may --epochs.
    assert run("mnist", "--accumulate-step", "3", "--resume", "c.safetensors")[0] == 0


@pytest.mark.parametrize(("arguments", "match"), [
    ("mnist --batch-size 0", r"argument --batch-size: expected a whole number from 1 to \d+, got '0'"),
    ("mnist --epochs 2.5", r"argument --epochs: expected a whole number from 1 to \d+, got '2.5'"),
    ("mnist --lr nan", r"argument --lr: expected a finite number > 0, got 'nan'"),
    ("mnist --clip-norm 0", "clip_norm is 0.0, expected a number > 0"),
    ("mnist --seed -1", r"argument --seed: expected a whole number from 0, got '-1'"),
    ("mnist --json /dev/null", r"argument --json: cannot write /dev/null \(it is not a regular file\); name a new"),
    ("mnist --json loop", r"argument --json: cannot write loop \(Symlink loop from .*\); name a new file"),
    ("mnist --json a.png --plot a.png", "arguments --(json|plot) and --(json|plot) name the same file; give each its"),
    ("mnist --plot missing/run.png", r"argument --plot: cannot write missing/run\.png \(No such file or directory\)"),
    ("mnist --save run", r"argument --save: run does not end in \.safetensors; name the file run\.safetensors"),
    ("mnist --compare --save c.safetensors", "argument --compare: it trains twice, .*; leave out --save and --resume"),
    ("mnist --resume=", r"\S+ ends in '', expected '\.safetensors'"),
    ("mnist --resume missing.safetensors",
     r"there is no checkpoint \S+missing\.safetensors; give a file that .*--save\) wrote"),
    ("mnist --compare --optimizer adam", "--compare trains in float64, which MindSpore's Adam does not take; give"),
    ("mnist --data nowhere", r"nowhere/train/train-images-idx3-ubyte .* is missing; expected a folder"),
    ("mnist --data full", "could not fetch MNIST .*--data embedded.*--data DIR"),
    ("mnist --plot run.png", "argument --plot: matplotlib is not installed; install it, .* -m pip install matplotlib"),
    ("mnist --batch 8", r"unrecognized arguments: --batch 8"),
    ("lm --text nowhere", r"argument --text: there is no file nowhere; give excerpt, topics or a file"),
    ("lm --text short", r"argument --text: short holds 1 different documents, expected at least 10; separate them"),
])
def test_wrong_input_is_refused_in_one_line_before_training(run, monkeypatch, tmp_path, arguments, match):
    """Also what is missing on this machine: matplotlib, and the network."""
    Path("short").write_text("one paragraph")
    Path("loop").symlink_to("loop")
    no_matplotlib = arguments.endswith(" run.png")
    monkeypatch.setattr("ms_accum.cli.options.find_spec", lambda name: None if no_matplotlib else name)
    monkeypatch.setattr(fetch, "MIRRORS", ["http://127.0.0.1:1/set.zip"])  # port 1 is closed
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(TrainStep, "epoch", None)
    before = {*os.listdir(), "cache"}
    status, out, err = run(*arguments.split())
    assert (status, [line for line in out if line != "" and line != "accumulated"], len(err)) == (2, [], 1)
    assert re.match(rf"ms-accum( mnist| lm)?: error: {match}", err[0])
    assert {*os.listdir()} <= before


OPTIONS = ["--data", "--batch-size", "--accumulate-step", "--epochs", "--lr", "--optimizer", "--clip-norm", "--seed",
           "--sync", "--zero", "--json", "--plot", "--save", "--resume"]
TEXTS = st.one_of(
    st.sampled_from([
        "", "0", "1", "-1", "nan", "inf", "1e400", "1e-300", "9" * 5000, "1_0", "0x10", "2147483648", "~",
        "~nobody-of-that-name", "/", ".", "/dev/null", "run.json", "run.png", "run.safetensors", "a/b", "a\0b",
        "\udcff", "%s", "--", "-", "--lr", "a" * 300, "\x1b[31m", "sgd", "microbatch", "full"]),
    st.text(st.characters(codec=None, exclude_characters="/"), max_size=8))  # writes into the scratch folder only


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_any_command_line_runs_or_is_refused_in_one_line(monkeypatch, tmp_path, capfd, count):
    """Without its training; the digits are few, the cache is empty and there are no mirrors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "MIRRORS", ())
    monkeypatch.setattr(TrainStep, "epoch", lambda self, batches: (Tensor(0.5) for _ in batches))
    data = str(write(tmp_path / "few", embedded_set(9, 5)))

    @settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(st.lists(max_size=4, elements=st.one_of(
        st.tuples(st.sampled_from(OPTIONS), TEXTS).map("=".join), st.just("--compare"), TEXTS)))
    @example(["--json=--"])  # these once ended in a traceback
    @example(["--batch-size=--"])
    @example(["--data=~nobody-of-that-name"])
    def run(arguments):
        assume(not any(argument.startswith(("-h", "--epochs=1_0", "--epochs=9")) for argument in arguments))
        status = cli.main(["mnist", "--data", data, "--batch-size", "3", "--epochs", "1", *arguments])
        captured = capfd.readouterr()
        if status == 0:
            assert ("epoch 1/" in captured.out or "resumed" in captured.out, captured.err) == (True, "")
        else:
            assert (status, "epoch 1/" in captured.out) == (2, False)
            assert re.fullmatch(r"ms-accum( mnist)?: error: .+\n", captured.err)

    run()


def test_a_scheduler_that_stops_says_why_in_one_line(run, monkeypatch):
    why = RuntimeError("It may be one of these:\n1.MS_SCHED_PORT is occupied.\n\n- C++ Call Stack")
    monkeypatch.setattr("mindspore.communication.init", Mock(side_effect=why))
    monkeypatch.setenv("MS_NODE_TIMEOUT", "30")
    monkeypatch.setenv("MS_ROLE", "MS_SCHED")
    status, out, (said,) = run("mnist")
    assert (status, out) == (2, [])
    assert said.startswith("ms-accum mnist: error: the scheduler stopped: It may be one of these: 1.MS_SCHED_PORT is")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns(name, run, monkeypatch):
    """What it says: tests/docs/test_guide.py."""
    monkeypatch.setenv("COLUMNS", "80")
    status, lines, _ = run(name, "--help")
    assert status == 0
    assert 70 < max(map(len, lines)) <= 80


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(run, monkeypatch):
    monkeypatch.setattr(program, "PROGRESS_SECONDS", 0)
    progress = r"epoch 1/2  \d+ of 90 digits  loss \d\.\d{4}"
    assert [line for line in run("mnist")[1] if re.fullmatch(progress, line)] != []
    bars, tqdm = [], program.tqdm
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setattr(program, "tqdm", lambda **options: bars.append(tqdm(mininterval=0, **options)) or bars[-1])
    status, out, err = run("mnist", "--batch-size", "10")
    assert (status, err) == (0, [])
    assert re.search(r"epoch 1/2: +\d+%.*\d.*digits/s, loss=\d\.\d{3}", "\n".join(out))
    assert [(bar.n, bar.disable) for bar in bars] == [(90, True)] * 2, "each bar is full and closed"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_defaults_reach_what_the_guide_says(name, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert cli.main([name, "--json", "run.json"]) == 0
    found = read("run.json")
    if name == "mnist":
        assert found["accuracy"] == pytest.approx(84.9)
    else:
        assert found["validation"] == pytest.approx(3.21, abs=0.05)
