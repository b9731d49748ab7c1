"""`ms-accum mnist`: what it prints, what it writes, what it refuses and how."""
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mnist_files import NAMES, embedded_set, random_set, write

import ms_accum
from ms_accum.cli import files, reference
from ms_accum.cli import main as cli
from ms_accum.cli import mnist as command
from ms_accum.mnist import data, fetch
from ms_accum.mnist.network import CountCorrect, Network
from ms_accum.mnist.settings import Settings
from ms_accum.mnist.train import Task, evaluate
from ms_accum.reference import figures, train
from ms_accum.update import Mean

# Op by op: each graph takes seconds to compile.
QUICK = ("--mode", "pynative", "--batch-size", "16", "--accumulate-step", "4", "--epochs", "2")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with the first 90 training and 50 test digits."""
    return str(write(tmp_path_factory.mktemp("digits"), embedded_set(90, 50)))


@pytest.fixture
def run(digits, capsys):
    """Run `ms-accum mnist` on a few digits in this process: (status, lines of stdout, lines of stderr)."""
    def run_mnist(*arguments, data=digits):
        status = cli.main(["mnist", "--data", data, *QUICK, *arguments])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()
    return run_mnist


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    from matplotlib.figure import Figure
    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **look: saved.append(figure) or savefig(figure, path, **look))
    return saved


def read(name):
    """The value of a JSON file; NaN and Infinity, which are not JSON, are refused."""
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")
    return json.loads(Path(name).read_text(), parse_constant=refuse)


def losses(name):
    return [epoch["loss"] for epoch in read(name)["epochs"]]


def lines_of_a_run():
    """Patterns of what the next test's run prints."""
    seconds = r"train \d+\.\d\d s  test \d+\.\d\d s"
    versions = f"ms_accum {ms_accum.__version__}, mindspore {ms.__version__}, numpy {np.__version__}"
    lines = [f"versions   {versions}, python 3.*",
             r"device     CPU, \d+ CPU cores, pynative mode, make_train_step, gradients in float32",
             "data       .*: 90 digits to train on, 50 to test on",
             "batch      16 x 4 = 64 digits an update",
             "optimizer  sgd, learning rate 0.05, clipped to norm 5, seed 7"]
    for epoch in (1, 2):  # without a terminal, a few plain lines of progress
        lines += [rf"epoch {epoch}/2  \d+ digits  loss \d\.\d{{4}}  [\d,]+ digits/s"] * (figures.PROGRESS_LINES - 1)
        lines += [rf"epoch {epoch}/2  loss \d\.\d{{4}}  accuracy \d+\.\d\d %  {seconds}"]
    return [*lines, "wrote run.ckpt", "wrote run.json"]


def test_a_run_prints_and_writes_every_figure_and_option(run, digits):
    status, out, err = run(*"--json run.json --save run.ckpt --clip-norm 5 --momentum 0.5 --lr 0.05 --seed 7".split())
    assert (status, err) == (0, [])
    assert sorted(os.listdir()) == ["run.ckpt", "run.json"]
    lines = lines_of_a_run()
    assert len(out) == len(lines)
    assert [line for line, expected in zip(out, lines) if not re.fullmatch(expected, line)] == []

    result = read("run.json")
    settings = Settings(
        batch_size=16, accumulate_step=4, epochs=2, lr=0.05, momentum=0.5, clip_norm=5.0, seed=7, mode="pynative")
    expected = list(train.train(Task(data.load(digits), settings)))
    assert f"accuracy {result['accuracy']:.2f} %" in out[-3]
    assert result.pop("accuracy") == expected[-1].score
    assert result.pop("loss") == pytest.approx(expected[-1].loss)
    assert losses("run.json") == pytest.approx([epoch.loss for epoch in expected])
    epochs = result.pop("epochs")
    assert [epoch["update_step"] for epoch in epochs] == [2, 4]
    assert set(epochs[0]) == {
        "epoch", "loss", "accuracy", "train_seconds", "test_seconds", "update_step", "noise_scale", "window_length"}
    for seconds in ("train_seconds", "test_seconds"):
        assert result.pop(seconds) == pytest.approx(sum(epoch[seconds] for epoch in epochs))
    assert result.pop("versions").keys() == {"ms_accum", "mindspore", "numpy", "python"}
    options = {"batch_size": 16, "accumulate_step": 4, "pieces": 1, "api": "functional",
               "sync": "window", "shard": False, "ranks_per_node": None}
    assert result.pop("options") == {
        **options, "data": digits, "epochs": 2, "lr": 0.05, "momentum": 0.5, "optimizer": "sgd", "clip_norm": 5.0, "seed": 7,
        "device_target": "CPU", "mode": "pynative", "compare": False, "json": "run.json", "plot": None, "save": "run.ckpt",
        "save_every": None, "resume": None, "noise_scale": False}
    assert result == {
        **options, "update_step": 4, "noise_scale": None, "ranks": 1, "effective_batch": 64, "gradients": "float32",
        "device": "CPU", "data": {"source": digits, "train_digits": 90, "test_digits": 50}}

    network = Network(seed=1)
    missing, unexpected = ms.load_param_into_net(network, ms.load_checkpoint("run.ckpt"))
    assert missing == []
    assert all(name == "ms_accum" or name.startswith(("optimizer:", "accumulator:")) for name in unexpected)
    assert evaluate(CountCorrect(network), data.load(digits).test, Settings()) == expected[-1].score


@pytest.mark.slow
def test_the_defaults_train_in_a_graph_on_the_embedded_digits(monkeypatch, capsys):
    """The first 2,000 of them, and the optimizer that learns fastest."""
    asked, whole = [], data.load("embedded")
    few = data.Mnist(*(data.Digits(d.images[:n], d.labels[:n]) for d, n in ((whole.train, 2000), (whole.test, 500))))
    monkeypatch.setattr(data, "load", lambda source: asked.append(source) or few)
    monkeypatch.delenv("MS_DEV_HOST_BLOCKING_RUN")
    assert cli.main(["mnist", "--optimizer", "momentum", "--json", "run.json"]) == 0
    assert asked == ["embedded"]
    assert os.environ["MS_DEV_HOST_BLOCKING_RUN"] == "1"
    out = capsys.readouterr().out
    assert "graph mode, make_train_step, gradients in float32" in out
    assert "32 x 2 = 64 digits an update" in out
    assert "momentum, learning rate 0.01, seed 42" in out
    assert "epoch 3/3" in out
    assert read("run.json")["accuracy"] > 80
    assert losses("run.json") == sorted(losses("run.json"), reverse=True)


def test_every_option_arrives_in_the_settings():
    def settings(line):
        return command.settings_of(cli._parser().parse_args(["mnist", *line.split()]))

    assert settings("") == Settings()
    assert settings(
        "--batch-size 8 --accumulate-step 3 --epochs 4 --lr 0.5 --momentum 0.25 --optimizer momentum --clip-norm inf --seed 0 "
        "--mode pynative --pieces 2 --noise-scale") == Settings(
            batch_size=8, accumulate_step=3, epochs=4, lr=0.5, momentum=0.25, optimizer="momentum", clip_norm=float("inf"),
            seed=0, mode="pynative", pieces=2, noise_scale=True)
    assert settings("--api model --sync microbatch --shard") == Settings(api="model", sync="microbatch", shard=True)
    assert settings("--compare") == Settings(gradients="float64")
    assert settings("--compare --device-target Ascend") == Settings()


@pytest.mark.parametrize("options", [pytest.param("--mode graph", marks=pytest.mark.slow), "--noise-scale --plot run.png"])
def test_compare_agrees_with_the_undivided_batch(run, options, drawn):
    status, out, _ = run("--compare", "--json", "run.json", "--lr", "0.1", *options.split())
    assert status == 0
    result = read("run.json")
    other = result["undivided"]
    assert 0 <= result["max_parameter_difference"] <= 1e-8
    assert result["gradients"] == "float64"
    assert (other["batch_size"], other["accumulate_step"]) == (64, 1)
    assert other["update_step"] == result["update_step"] == 4
    assert other["accuracy"] == result["accuracy"]
    printed = [line for line in out if not line.startswith("wrote")]
    assert printed[-3:] == [f"accumulated  16 x 4 = 64 digits an update: accuracy {result['accuracy']:.2f} %",
                        f"undivided    64 x 1 = 64 digits an update: accuracy {other['accuracy']:.2f} %",
                        f"largest parameter difference {result['max_parameter_difference']:.3g}"]

    if "--plot" not in options:
        return
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")
    loss_axes, accuracy_axes, noise_axes = drawn[0].axes
    assert [text.get_text() for text in accuracy_axes.get_legend().get_texts()] == ["accumulated", "undivided"]
    for line, epochs in zip(accuracy_axes.lines, (result["epochs"], other["epochs"]), strict=True):
        assert line.get_ydata().tolist() == [epoch["accuracy"] for epoch in epochs]
    assert [len(line.get_ydata()) for line in loss_axes.lines] == [12, 2, 4, 2]
    assert (loss_axes.get_ylabel(), accuracy_axes.get_ylabel()) == ("loss", "accuracy in %")
    assert noise_axes.lines[0].get_ydata().tolist() == [epoch["noise_scale"] for epoch in result["epochs"]]


def test_compare_shows_a_wrong_divisor(run, monkeypatch):
    monkeypatch.setattr(Mean, "factor", lambda self, unit, weight: 1.0)
    assert run("--compare", "--json", "run.json")[0] == 0
    assert read("run.json")["max_parameter_difference"] > 1e-3


def test_a_run_that_diverges_is_reported_in_valid_json(run):
    status, out, _ = run("--lr", "1e30", "--json", "run.json")
    assert status == 0
    assert "loss nan" in out[-2]
    assert read("run.json")["loss"] is None is not read("run.json")["accuracy"]


def test_progress_shows_a_speed_once_it_is_measured(capsys):
    """A resumed run may begin where a line is due."""
    settings = SimpleNamespace(epochs=1, adaptive=False)
    progress = figures.Progress(SimpleNamespace(settings=settings, data=SimpleNamespace(size=100), words=SimpleNamespace(unit="digits")))
    for done in (60, 90):
        progress(None, 1, done, Tensor(0.5))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "epoch 1/1  60 digits  loss 0.5000"
    assert re.fullmatch(r"epoch 1/1  90 digits  loss 0\.5000  [1-9][\d,]* digits/s", second)


def test_killed_at_a_random_microbatch_and_resumed(digits, run):
    """All state and the losses are bit-identical to those of the run that was never killed."""
    options = ["--epochs", "12", "--optimizer", "momentum"]
    command_line = [sys.executable, "-m", "ms_accum", "mnist", "--data", digits, *QUICK, *options]
    killed = subprocess.Popen([*command_line, "--save", "c.ckpt", "--save-every", "7"], stdout=subprocess.DEVNULL)
    while not Path("c.ckpt").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.8))
    killed.kill()
    killed.wait()

    status, out, err = run(*options, "--resume", "c.ckpt", "--save", "c.ckpt", "--json", "c.json")
    assert (status, err) == (0, [])
    assert any(re.fullmatch(r"resumed    c.ckpt: \d+ epochs and \d+ microbatches done", line) for line in out)
    assert run(*options, "--save", "whole.ckpt", "--json", "whole.json")[0] == 0
    assert losses("c.json") == losses("whole.json")
    trained, whole = (ms.load_checkpoint(f"{name}.ckpt") for name in ("c", "whole"))
    assert trained.keys() == whole.keys()
    for name in trained:
        if name != "ms_accum":  # which holds the seconds that epochs took
            assert trained[name].asnumpy().tobytes() == whole[name].asnumpy().tobytes(), name


def test_the_noise_scale_is_printed_written_and_drawn_and_resumed(run, drawn, monkeypatch):
    """More epochs may be added to a finished run."""
    status, out, err = run("--noise-scale", "--json", "run.json", "--plot", "run.png")
    assert (status, err) == (0, [])
    epochs = [epoch["noise_scale"] for epoch in read("run.json")["epochs"]]
    assert read("run.json")["noise_scale"] == epochs[1] != epochs[0]
    assert all(scale > 0 for scale in epochs)
    for epoch, scale in enumerate(epochs, 1):
        assert any(re.fullmatch(rf"epoch {epoch}/2  loss .* s  noise scale {scale:,.0f} digits", line) for line in out)
    verdict = "a larger batch saves updates" if epochs[1] > 64 else "a smaller batch learns as much from an update"
    ratio = f"{epochs[1] / 64:.2g} x the 64 of an update"
    critical = f"critical batch size about {epochs[1]:,.0f} digits, {ratio}: {verdict}"
    assert out[-3:] == [critical, "wrote run.json", "wrote run.png"]
    noise_axes = drawn[0].axes[2]
    assert noise_axes.lines[0].get_ydata().tolist() == epochs
    legend = [text.get_text() for text in noise_axes.get_legend().get_texts()]
    assert legend == ["critical batch size (noise scale)", "an update: 64 digits"]

    done, save = [], train.save_checkpoint
    monkeypatch.setattr(train, "save_checkpoint", lambda *a, extra: done.append(len(extra["losses"])) or save(*a, extra=extra))
    assert run("--noise-scale", "--epochs", "1", "--save", "one.ckpt", "--save-every", "3")[0] == 0
    assert done == [3, 6, 0], "microbatches of the open epoch"
    status, out, _ = run("--noise-scale", "--resume", "one.ckpt", "--json", "resumed.json")
    assert status == 0
    assert "resumed    one.ckpt: 1 epochs and 0 microbatches done" in out
    assert losses("resumed.json") == losses("run.json")
    assert read("resumed.json")["epochs"][1]["noise_scale"] == epochs[1]


def test_what_cannot_be_resumed_is_refused(run, tmp_path):
    assert run("--save", "c.ckpt")[0] == 0
    others = str(write(tmp_path / "others", random_set(90, 50)))  # as many, of the same shapes
    digits = r"digits 90 \+ 50 with the SHA-256"
    for options, changed, message in [
        (["--lr", "0.5"], {}, r"checkpoint is from a run with lr 0\.01, but this run has 0\.5; give the same options"),
        (["--accumulate-step", "3"], {}, "checkpoint is from a run with accumulate_step 4, but this run has 3"),
        (["--epochs", "1"], {}, "the checkpoint holds 2 epochs, but this run has only 1; give more --epochs"),
        ([], {"data": others}, rf"from a run with {digits} \w{{64}}, but this run has {digits[7:]} \w{{64}}; give the same"),
    ]:
        status, _, err = run("--resume", "c.ckpt", *options, **changed)
        assert (status, len(err)) == (1, 1)
        assert re.search(message, err[0])
    moved = str(write(tmp_path / "moved", embedded_set(90, 50)))  # control: the same ones elsewhere
    assert run("--resume", "c.ckpt", data=moved)[0] == 0
    ms.save_checkpoint(Network(42), "others.ckpt")
    for path, content, message in [("c.ckpt", Path("c.ckpt").read_bytes()[:-9], "c.ckpt is (damaged|truncated)"),
                                   ("others.ckpt", Path("others.ckpt").read_bytes(), "others.ckpt")]:
        Path(path).write_bytes(content)
        status, _, err = run("--resume", path)
        assert (status, len(err)) == (1, 1)
        assert re.search(message, err[0])


@pytest.mark.parametrize(("arguments", "match"), [
    ("--batch-size 0", r"argument --batch-size: expected a whole number from 1 to \d+, got '0'"),
    ("--batch-size 91", "argument --batch-size: a microbatch of 91 digits cannot be filled from 90; choose at most"),
    ("--accumulate-step 2.5", r"argument --accumulate-step: expected a whole number"),
    ("--accumulate-step 2147483648", r"argument --accumulate-step: expected a whole number from 1 to 2147483647"),
    ("--epochs x", r"argument --epochs: expected a whole number from 1 to \d+, got 'x'"),
    ("--lr 0", r"argument --lr: expected a finite number > 0, got '0'"),
    ("--lr nan", r"argument --lr: expected a finite number > 0, got 'nan'"),
    ("--momentum 1", r"argument --momentum: expected a number from 0 to below 1, got '1'"),
    ("--momentum 0.9 --optimizer adam", r"argument --momentum: adam takes none; leave it out"),
    ("--clip-norm 0", r"argument --clip-norm: expected a number > 0, got '0'"),
    ("--seed -1", r"argument --seed: expected a whole number from 0, got '-1'"),
    ("--device-target TPU", r"argument --device-target: invalid choice: 'TPU'"),
    ("--json /dev/null", r"argument --json: /dev/null is not a regular file"),
    ("--json a.png --plot a.png", "arguments --json and --plot name the same file; give each its own"),
    ("--plot run.jpg", r"argument --plot: run\.jpg does not end in \.png; name the file run\.png"),
    ("--plot missing/run.png", r"argument --plot: cannot write missing/run\.png: missing: No such file or directory; "),
    ("--save run", r"argument --save: run does not end in \.ckpt or \.safetensors; name the file run\.ckpt"),
    ("--save-every 3", r"argument --save-every: requires --save FILE\.ckpt"),
    ("--save c.ckpt --save-every 3 --compare", "argument --compare: trains twice and cannot be resumed"),
    ("--resume none.ckpt", r"argument --resume: there is no file none\.ckpt; give one that --save wrote"),
    (f"--resume {__file__}", r"argument --resume: .* does not end in \.ckpt or \.safetensors; give a file that"),
    ("--api model --pieces 2", "argument --api: a Model trains one graph, which cuts no microbatch; leave out --pieces"),
    ("--api model --accumulate-step adaptive", "argument --api: a Model trains one graph, which cannot choose lengths; leave out"),
    ("--micro-size 2", "argument --micro-size: is now called --pieces"),
    ("--noise-scale --accumulate-step 1", "argument --noise-scale: compares the microbatches of a window, which holds only"),
    ("--data nowhere", r"nowhere/train/train-images-idx3-ubyte .* is missing; expected a folder"),
    ("--unknown", r"unrecognized arguments: --unknown"),
    ("--batch 8", r"unrecognized arguments: --batch 8"),
])
def test_a_bad_value_is_refused_in_one_line_before_training(run, monkeypatch, arguments, match):
    monkeypatch.setattr(train, "train", None)
    status, out, err = run(*arguments.split())
    assert (status, out) == (2, [])
    assert len(err) == 1
    assert re.match(rf"ms-accum( mnist)?: error: {match}", err[0])
    assert os.listdir() == []


def test_what_is_missing_on_this_machine_is_refused_before_training(run, monkeypatch, tmp_path):
    """Whole files, matplotlib, a device, the network."""
    only = "This process only supports one of the ['CPU']."

    def set_device(name):
        raise RuntimeError(f"Unsupported device target {name}. {only} Please check\n\nlibraries")

    monkeypatch.setattr(train, "train", None)
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    monkeypatch.setattr(ms, "set_device", set_device)
    monkeypatch.setattr(fetch, "MIRRORS", ["http://127.0.0.1:1/set.zip"])  # port 1 is closed
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = rf"argument --device-target: (\w+) cannot be used here \(Unsupported device target \1\. {re.escape(only)}\); try .* CPU"
    write(tmp_path / "damaged", {**embedded_set(5, 5), NAMES[1]: b""})
    for options, status, message in [
        (["--data", str(tmp_path / "damaged")], 2, "/.*train-labels-idx1-ubyte holds 0 bytes, but an idx1 header has 8; .*"),
        (["--plot", "run.png"], 2, "argument --plot: matplotlib is not installed; install it, .* -m pip install matplotlib"),
        (["--device-target", "GPU"], 2, device),
        (["--device-target", "Ascend"], 2, device),
        (["--data", "full"], 1, "could not fetch MNIST .*--data embedded.*--data DIR.*"),
    ]:
        got, out, err = run(*options)
        assert (got, out, len(err)) == (status, [], 1)
        assert re.fullmatch(f"ms-accum mnist: error: {message}", err[0])


def test_a_file_that_cannot_be_written_after_all(run, monkeypatch):
    def full(path, figures):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(reference, "write_json", full)
    status, out, err = run("--json", "run.json")
    assert status == 1
    assert err == ["ms-accum mnist: error: [Errno 28] No space left on device: 'run.json'"]
    assert "accuracy" in out[-1]


def test_a_terminal_shows_a_bar_with_loss_and_rate(run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setattr(figures, "tqdm", lambda **options: bars.append(tqdm(mininterval=0, **options)) or bars[-1])
    from tqdm import tqdm
    bars = []
    status, out, err = run("--batch-size", "10")
    assert (status, err) == (0, [])
    text = "\n".join(out)
    assert re.search(r"epoch 1/2: +\d+%.*\d.*digits/s, loss=\d\.\d{3}", text)
    assert len(bars) == 2
    assert all(bar.n == 90 and bar.disable for bar in bars), "each bar is full and closed"
    assert re.search(r"epoch 2/2  loss \d\.\d{4}  accuracy", text)


# --- several ranks --------------------------------------------------------------------------------------------------------


def test_parts_of_a_checkpoint_without_that_of_rank_0_are_refused(run):
    Path("run.rank1of2-0123456789abcdef.ckpt").touch()
    status, _, errors = run("--resume", "run.ckpt")
    assert status == 1
    assert "run.ckpt" in errors[0]


def test_a_scheduler_that_stops_says_why_in_one_line(monkeypatch, capsys):
    def init():
        raise RuntimeError("It may be one of the following reasons:\n1.MS_SCHED_PORT is occupied.\n\n- C++ Call Stack")

    monkeypatch.setenv("MS_NODE_TIMEOUT", "30")
    with pytest.raises(SystemExit) as end:
        reference._schedule(init)
    assert end.value.code == 1
    assert capsys.readouterr().err == ("ms-accum: the scheduler stops: It may be one of the following reasons: "
                                       "1.MS_SCHED_PORT is occupied.\n")
