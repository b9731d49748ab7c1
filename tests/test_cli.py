"""`ms-accum mnist`: what it prints, what it writes, what it refuses and how."""
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mnist_files import embedded_set, random_set, write

import ms_accum
from ms_accum.cli import files as output
from ms_accum.cli import main as cli
from ms_accum.cli import mnist as command
from ms_accum.mnist import data, fetch, report, train
from ms_accum.mnist.network import Network
from ms_accum.mnist.settings import Settings

# Op by op: each graph takes seconds to compile.
QUICK = ("--mode", "pynative", "--batch-size", "16", "--accumulate-step", "4", "--epochs", "2")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with the first 90 training and 50 test digits."""
    return str(write(tmp_path_factory.mktemp("digits"), embedded_set(90, 50)))


@pytest.fixture
def run(digits, capsys):
    """Run `ms-accum mnist` on a few digits in this process: (status, lines of stdout, lines of stderr)."""
    def run_mnist(*arguments, data=digits, quick=True):
        status = cli.main(["mnist", "--data", data, *(QUICK if quick else ()), *arguments])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()
    return run_mnist


def strict(text):
    """The value of a JSON text; NaN and Infinity, which are not JSON, are refused."""
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")
    return json.loads(text, parse_constant=refuse)


# --- a run ----------------------------------------------------------------------------------------------------------


def test_a_run_prints_header_and_epochs(run):
    status, out, err = run("--clip-norm", "5")
    assert (status, err) == (0, [])
    text = "\n".join(out)
    for version in (f"ms_accum {ms_accum.__version__}", f"mindspore {ms.__version__}", f"numpy {np.__version__}", "python 3."):
        assert version in out[0]
    assert re.search(r"^device     CPU, \d+ CPU cores, pynative mode", text, re.MULTILINE)
    assert ": 90 digits to train on, 50 to test on" in text
    assert "16 x 4 = 64 digits an update" in text
    assert "sgd, learning rate 0.01, clipped to norm 5, seed 42" in text
    epochs = [line for line in out if re.fullmatch(
        r"epoch \d/2  loss \d\.\d{4}  accuracy \d+\.\d\d %  train \d+\.\d\d s  test \d+\.\d\d s", line)]
    assert [line[:9] for line in epochs] == ["epoch 1/2", "epoch 2/2"]
    # Piped: a few plain lines of progress for each epoch.
    progress = [line for line in out if re.fullmatch(r"epoch \d/2  \d+ digits  loss \d\.\d{4}  [\d,]+ digits/s", line)]
    assert len(progress) == 2 * (report.PROGRESS_LINES - 1)
    assert len(out) == 5 + len(epochs) + len(progress)


def test_the_defaults_run_in_a_graph_on_the_embedded_digits(monkeypatch, capsys, digits):
    asked = []
    monkeypatch.setattr(data, "load", lambda source: asked.append(source) or data.load_folder(Path(digits)))
    monkeypatch.delenv("MS_DEV_HOST_BLOCKING_RUN")
    assert cli.main(["mnist"]) == 0
    assert asked == ["embedded"]
    assert os.environ["MS_DEV_HOST_BLOCKING_RUN"] == "1"
    out = capsys.readouterr().out
    assert "graph mode, make_train_step, gradients in float32" in out
    assert "32 x 2 = 64 digits an update" in out
    assert "sgd, learning rate 0.01, seed 42" in out
    assert "epoch 3/3" in out


def test_json_holds_every_figure_and_option(run, digits):
    status, out, _ = run("--json", "run.json", "--momentum", "0.5", "--lr", "0.05", "--seed", "7")
    assert status == 0
    figures = strict(Path("run.json").read_text())
    assert os.listdir() == ["run.json"]

    settings = Settings(batch_size=16, accumulate_step=4, epochs=2, lr=0.05, momentum=0.5, seed=7, mode="pynative")
    epochs = list(train.train(data.load(digits), Network(7), settings))
    assert figures["accuracy"] == epochs[-1].accuracy
    assert figures["loss"] == pytest.approx(epochs[-1].loss)
    assert [epoch["loss"] for epoch in figures["epochs"]] == pytest.approx([epoch.loss for epoch in epochs])
    assert [epoch["update_step"] for epoch in figures["epochs"]] == [2, 4]
    assert figures["epochs"][0].keys() == {
        "epoch", "loss", "accuracy", "train_seconds", "test_seconds", "update_step", "noise_scale"}
    assert figures["train_seconds"] == pytest.approx(sum(epoch["train_seconds"] for epoch in figures["epochs"]))
    assert figures["test_seconds"] == pytest.approx(sum(epoch["test_seconds"] for epoch in figures["epochs"]))
    assert figures["effective_batch"] == 64
    assert figures["data"] == {"source": digits, "train_digits": 90, "test_digits": 50}
    assert figures["device"] == "CPU"
    assert figures["gradients"] == "float32"
    assert figures["versions"].keys() == {"ms_accum", "mindspore", "numpy", "python"}
    assert figures["options"] == {
        "data": digits, "batch_size": 16, "accumulate_step": 4, "epochs": 2, "lr": 0.05, "momentum": 0.5, "optimizer": "sgd",
        "clip_norm": None, "seed": 7, "device_target": "CPU", "mode": "pynative", "api": "functional", "strategy": "fused", "micro_size": 1,
        "compare": False,
        "json": "run.json", "plot": None, "save": None, "save_every": None, "resume": None, "sync": "window", "shard": False,
        "noise_scale": False}
    assert figures["noise_scale"] is None
    assert "max_parameter_difference" not in figures
    assert f"accuracy {figures['accuracy']:.2f} %" in out[-1]


def test_every_option_arrives_in_the_settings():
    options = cli._parser().parse_args([
        "mnist", "--batch-size", "8", "--accumulate-step", "3", "--epochs", "4", "--lr", "0.5", "--momentum", "0.25",
        "--optimizer", "momentum", "--clip-norm", "inf", "--seed", "0", "--mode", "pynative", "--strategy", "split", "--micro-size", "2"])
    assert command.settings_of(options) == Settings(
        batch_size=8, accumulate_step=3, epochs=4, lr=0.5, momentum=0.25, optimizer="momentum", clip_norm=float("inf"), seed=0,
        mode="pynative", strategy="split", micro_size=2)
    assert command.settings_of(cli._parser().parse_args(["mnist"])) == Settings()
    compared = cli._parser().parse_args(["mnist", "--compare"])
    assert command.settings_of(compared) == Settings(gradients="float64")
    compared.device_target = "Ascend"
    assert command.settings_of(compared) == Settings()


def test_a_run_that_diverges_is_reported_in_valid_json(run):
    status, out, _ = run("--lr", "1e30", "--json", "run.json")
    assert status == 0
    assert "loss nan" in out[-1]
    figures = strict(Path("run.json").read_text())
    assert figures["loss"] is None
    assert figures["accuracy"] is not None


def test_as_json():
    assert report.as_json({"a": [1, float("nan"), (float("inf"), 2.5)], "b": None, "c": "nan"}) == {
        "a": [1, None, [None, 2.5]], "b": None, "c": "nan"}


# --- compare --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_compare_agrees_with_the_undivided_batch(run, mode):
    status, out, _ = run("--compare", "--json", "run.json", "--lr", "0.1", "--mode", mode)
    assert status == 0
    figures = strict(Path("run.json").read_text())
    assert 0 <= figures["max_parameter_difference"] <= 1e-8
    assert figures["gradients"] == "float64"
    assert figures["undivided"]["batch_size"] == 64
    assert figures["undivided"]["accumulate_step"] == 1
    assert figures["undivided"]["update_step"] == figures["update_step"] == 4
    assert figures["undivided"]["accuracy"] == figures["accuracy"]
    assert out[-3] == f"accumulated  16 x 4 = 64 digits an update: accuracy {figures['accuracy']:.2f} %"
    assert out[-2] == f"undivided    64 x 1 = 64 digits an update: accuracy {figures['undivided']['accuracy']:.2f} %"
    assert out[-1] == f"largest parameter difference {figures['max_parameter_difference']:.3g}"


def test_compare_shows_a_wrong_divisor(run, monkeypatch):
    def divided_twice(self, unit, weight):
        return unit / (weight * self.accumulate_step)

    monkeypatch.setattr(ms_accum.Accumulator, "_normaliser", divided_twice)
    status, _, _ = run("--compare", "--json", "run.json")
    assert status == 0
    assert strict(Path("run.json").read_text())["max_parameter_difference"] > 1e-3


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_checkpoint_holds_the_trained_network(run, digits):
    status, _, _ = run("--save", "run.ckpt", "--json", "run.json")
    assert status == 0
    assert sorted(os.listdir()) == ["run.ckpt", "run.json"]
    network = Network(seed=1)
    missing, unexpected = ms.load_param_into_net(network, ms.load_checkpoint("run.ckpt"))
    assert missing == []
    assert all(name == "ms_accum" or name.startswith(("optimizer:", "accumulator:")) for name in unexpected)
    from ms_accum.mnist.step import CountCorrect
    accuracy = train.evaluate(CountCorrect(network), data.load(digits).test, Settings())
    assert accuracy == strict(Path("run.json").read_text())["accuracy"]
    assert run("--save", "run.ckpt")[0] == 0, "an existing checkpoint is replaced"


def test_killed_at_a_random_microbatch_and_resumed(tmp_path):
    """All state and the losses are those of the run that was never killed, to the bit."""
    options = ["--batch-size", "100", "--epochs", "3", "--optimizer", "momentum", "--accumulate-step", "3"]
    command_line = [sys.executable, "-m", "ms_accum", "mnist", *options]
    subprocess.run([*command_line, "--save", "whole.ckpt", "--json", "whole.json"], cwd=tmp_path, check=True, capture_output=True)

    killed = subprocess.Popen([*command_line, "--save", "c.ckpt", "--save-every", "7"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    while not (tmp_path / "c.ckpt").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.8))
    killed.kill()
    killed.wait()

    resumed = subprocess.run([*command_line, "--resume", "c.ckpt", "--save", "c.ckpt", "--json", "c.json"], cwd=tmp_path, check=True,
                             capture_output=True, text=True)
    assert re.search(r"^resumed    c.ckpt: \d epochs and \d+ microbatches done$", resumed.stdout, re.MULTILINE)
    losses, expected = ([epoch["loss"] for epoch in strict((tmp_path / f"{name}.json").read_text())["epochs"]] for name in ("c", "whole"))
    assert losses == expected
    trained, whole = (ms.load_checkpoint(str(tmp_path / f"{name}.ckpt")) for name in ("c", "whole"))
    assert trained.keys() == whole.keys()
    for name in trained:
        if name != "ms_accum":  # which holds the seconds that epochs took
            assert trained[name].asnumpy().tobytes() == whole[name].asnumpy().tobytes(), name


def test_resume_goes_on_with_more_epochs(run):
    assert run("--save", "c.ckpt", "--epochs", "1")[0] == 0
    status, out, _ = run("--resume", "c.ckpt", "--json", "c.json")
    assert status == 0
    assert "resumed    c.ckpt: 1 epochs and 0 microbatches done" in out
    assert run("--json", "whole.json")[0] == 0
    resumed, whole = (strict(Path(f"{name}.json").read_text()) for name in ("c", "whole"))
    assert [epoch["loss"] for epoch in resumed["epochs"]] == [epoch["loss"] for epoch in whole["epochs"]]


def test_what_cannot_be_resumed_is_refused(run, tmp_path):
    assert run("--save", "c.ckpt", "--epochs", "1")[0] == 0
    for options, status, message in [
        (["--resume", "none.ckpt"], 2, "argument --resume: there is no file none.ckpt; give one that --save wrote"),
        (["--resume", "c.ckpt", "--lr", "0.5"], 1, "the checkpoint is of a run with lr 0.01, but this one has 0.5; give the same options"),
        (["--resume", "c.ckpt", "--accumulate-step", "3"], 1, "was saved with accumulate_step"),
        (["--api", "model", "--strategy", "split"], 2, "argument --strategy: a Model trains one Cell, which is one graph; leave out"),
        (["--save-every", "3"], 2, "argument --save-every: says when, but not where; add --save FILE.ckpt"),
        (["--resume", "c.ckpt", "--compare"], 2, "argument --compare: a comparison trains twice and cannot be resumed"),
        (["--save", "c.pkl"], 2, "c.pkl does not end in .ckpt or .safetensors; name the file c.ckpt"),
    ]:
        got, _, err = run(*options)
        assert got == status, err
        assert len(err) == 1
        assert message in err[0]
    others = str(write(tmp_path / "others", random_set(90, 50)))  # as many, of the same shapes
    status, _, err = run("--resume", "c.ckpt", data=others)
    assert (status, len(err)) == (1, 1)
    digest = r"90 \+ 50 with the SHA-256 \w{64}"
    assert re.search(rf"is of a run with digits {digest}, but this one has {digest}; give the same options and digits", err[0])
    moved = str(write(tmp_path / "moved", embedded_set(90, 50)))  # control: the same ones elsewhere
    assert run("--resume", "c.ckpt", data=moved)[0] == 0
    Path("c.ckpt").write_bytes(Path("c.ckpt").read_bytes()[:-9])
    status, _, err = run("--resume", "c.ckpt")
    assert (status, len(err)) == (1, 1)
    assert "c.ckpt is damaged" in err[0] or "c.ckpt is truncated" in err[0]


def test_the_plot_shows_both_runs(run, monkeypatch):
    drawn = []
    from matplotlib.figure import Figure
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: (drawn.append(self), savefig(self, *args, **kwargs))[1])
    status, _, _ = run("--plot", "run.png", "--compare", "--json", "run.json")
    assert status == 0
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")
    figures = strict(Path("run.json").read_text())
    loss_axes, accuracy_axes = drawn[0].axes
    assert [text.get_text() for text in accuracy_axes.get_legend().get_texts()] == ["accumulated", "undivided"]
    for line, run_figures in zip(accuracy_axes.lines, (figures, figures["undivided"]), strict=True):
        assert line.get_ydata().tolist() == [epoch["accuracy"] for epoch in run_figures["epochs"]]
    assert [len(line.get_ydata()) for line in loss_axes.lines] == [12, 2, 4, 2]
    assert (loss_axes.get_ylabel(), accuracy_axes.get_ylabel()) == ("loss", "accuracy in %")


def test_the_noise_scale_is_printed_written_and_drawn(run, monkeypatch):
    """That of a GradientNoiseScale over the last epoch's microbatches; a resumed run has the same."""
    drawn = []
    from matplotlib.figure import Figure
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (drawn.append(self), Path(path).write_bytes(b""))[1])
    status, out, err = run("--noise-scale", "--json", "run.json", "--plot", "run.png", "--save", "run.ckpt")
    assert (status, err) == (0, [])
    figures = strict(Path("run.json").read_text())
    epochs = [epoch["noise_scale"] for epoch in figures["epochs"]]
    assert figures["noise_scale"] == epochs[1] != epochs[0]
    assert all(scale > 0 for scale in epochs)
    for epoch, scale in enumerate(epochs, 1):
        assert any(re.fullmatch(rf"epoch {epoch}/2  loss .* s  noise scale {scale:,.0f} digits", line) for line in out)
    verdict = "a larger batch saves updates" if epochs[1] > 64 else "a smaller batch learns as much from an update"
    assert out[-1] == f"critical batch size about {epochs[1]:,.0f} digits, {epochs[1] / 64:.2g} x the 64 of an update: {verdict}"
    noise_axes = drawn[0].axes[2]
    assert noise_axes.lines[0].get_ydata().tolist() == epochs
    assert [text.get_text() for text in noise_axes.get_legend().get_texts()] == [
        "critical batch size (noise scale)", "an update: 64 digits"]

    status, _, _ = run("--noise-scale", "--epochs", "1", "--save", "one.ckpt", "--save-every", "3")
    assert status == 0
    status, _, _ = run("--noise-scale", "--resume", "one.ckpt", "--json", "resumed.json")
    assert strict(Path("resumed.json").read_text())["epochs"][1]["noise_scale"] == epochs[1]
    status, _, err = run("--noise-scale", "--accumulate-step", "1")
    assert (status, len(err)) == (2, 1)
    assert "argument --noise-scale: compares the microbatches of a window, which holds only one; give --accumulate-step 2" in err[0]


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), output.whole(path) as part:  # noqa: PT012
        part.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "before"
    with output.whole(path) as part:
        part.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_can_not_be_written_after_all(run, monkeypatch):
    def full(path, figures):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(output, "write_json", full)
    status, out, err = run("--json", "run.json")
    assert status == 1
    assert err == ["ms-accum mnist: error: [Errno 28] No space left on device: 'run.json'"]
    assert "accuracy" in out[-1]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "match"), [
    (["--batch-size", "0"], r"argument --batch-size: expected a whole number from 1 to \d+, got '0'"),
    (["--batch-size", "-3"], r"argument --batch-size: expected a whole number"),
    (["--batch-size", "91"], r"argument --batch-size: a microbatch of 91 digits cannot be filled from 90; choose at most 90"),
    (["--accumulate-step", "0"], r"argument --accumulate-step: expected a whole number from 1 to \d+, got '0'"),
    (["--accumulate-step", "2.5"], r"argument --accumulate-step: expected a whole number"),
    (["--accumulate-step", "2147483648"], r"argument --accumulate-step: expected a whole number from 1 to 2147483647"),
    (["--epochs", "0"], r"argument --epochs: expected a whole number"),
    (["--epochs", "x"], r"argument --epochs: expected a whole number from 1 to \d+, got 'x'"),
    (["--lr", "0"], r"argument --lr: expected a finite number > 0, got '0'"),
    (["--lr", "-0.1"], r"argument --lr: expected a finite number > 0"),
    (["--lr", "nan"], r"argument --lr: expected a finite number > 0, got 'nan'"),
    (["--lr", "inf"], r"argument --lr: expected a finite number > 0"),
    (["--momentum", "1"], r"argument --momentum: expected a number from 0 to below 1, got '1'"),
    (["--momentum", "nan"], r"argument --momentum: expected a number"),
    (["--momentum", "0.9", "--optimizer", "adam"], r"argument --momentum: adam takes none; leave it out"),
    (["--clip-norm", "0"], r"argument --clip-norm: expected a number > 0, got '0'"),
    (["--clip-norm", "nan"], r"argument --clip-norm: expected a number > 0"),
    (["--seed", "-1"], r"argument --seed: expected a whole number from 0, got '-1'"),
    (["--optimizer", "lamb"], r"argument --optimizer: invalid choice: 'lamb'"),
    (["--mode", "eager"], r"argument --mode: invalid choice: 'eager'"),
    (["--device-target", "TPU"], r"argument --device-target: invalid choice: 'TPU'"),
    (["--json", "missing/run.json"], r"argument --json: cannot write missing/run\.json: missing: No such file or directory; name a file"),
    (["--json", "."], r"argument --json: \. is no regular file; name a new file"),
    (["--json", "/dev/null"], r"argument --json: /dev/null is no regular file"),
    (["--plot", "run.jpg"], r"argument --plot: run\.jpg does not end in \.png; name the file run\.png"),
    (["--plot", "missing/run.png"], r"argument --plot: cannot write missing/run\.png"),
    (["--save", "run"], r"argument --save: run does not end in \.ckpt or \.safetensors; name the file run\.ckpt"),
    (["--save", "missing/run.ckpt"], r"argument --save: cannot write missing/run\.ckpt"),
    (["--data", "nowhere"], r"nowhere/train/train-images-idx3-ubyte .* is missing; expected a folder"),
    (["--unknown"], r"unrecognized arguments: --unknown"),
    (["--batch", "8"], r"unrecognized arguments: --batch 8"),
])
def test_a_bad_value_is_refused_in_one_line_before_training(run, monkeypatch, arguments, match):
    monkeypatch.setattr(train, "train", None)
    status, out, err = run(*arguments)
    assert (status, out) == (2, [])
    assert len(err) == 1
    assert re.match(rf"ms-accum( mnist)?: error: {match}", err[0])
    assert os.listdir() == []


def test_no_command_is_refused_in_one_line(capsys):
    assert cli.main([]) == 2
    assert capsys.readouterr().err == "ms-accum: error: the following arguments are required: COMMAND\n"


def test_damaged_digits_are_refused_in_one_line(run, tmp_path):
    files = embedded_set(5, 5)
    name = "train/train-images-idx3-ubyte"
    write(tmp_path / "cut", {**files, name: files[name][:-1]})
    status, out, err = run(data=str(tmp_path / "cut"))
    assert (status, out, len(err)) == (2, [], 1)
    assert "train-images-idx3-ubyte holds 3919 bytes behind its header, expected 3920 for 5 items" in err[0]


def test_plot_without_matplotlib_is_refused_before_training(run, monkeypatch):
    monkeypatch.setattr(train, "train", None)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    status, _, err = run("--plot", "run.png")
    assert (status, len(err)) == (2, 1)
    assert "matplotlib is not installed; install it, e.g. with " in err[0]


@pytest.mark.parametrize("target", ["GPU", "Ascend"])
def test_a_device_that_is_not_there_is_refused_in_one_line(run, monkeypatch, target):
    def set_device(name):
        raise RuntimeError(f"Unsupported device target {name}. This process only supports one of the ['CPU']. Please check\n\nlibraries")

    monkeypatch.setattr(ms, "set_device", set_device)
    status, out, err = run("--device-target", target)
    assert (status, out) == (2, [])
    assert err == [
        f"ms-accum mnist: error: argument --device-target: {target} cannot be used here (Unsupported device target {target}. "
        "This process only supports one of the ['CPU'].); try --device-target CPU"]


def test_full_without_network_is_one_line_and_status_1(run, monkeypatch, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    monkeypatch.setattr(fetch, "MIRRORS", [f"http://127.0.0.1:{closed}/set.zip", f"http://127.0.0.1:{closed}/mnist/"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status, out, err = run(data="full")
    assert (status, out) == (1, [])
    assert len(err) == 1
    assert re.match(r"ms-accum mnist: error: could not fetch MNIST .*--data embedded.*--data DIR", err[0])


def test_ctrl_c_is_one_line_and_status_130(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupted)
    status, _, err = run()
    assert (status, err) == (130, ["ms-accum: interrupted"])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert os.listdir() == []


# --- terminal -------------------------------------------------------------------------------------------------------


def test_a_terminal_shows_a_bar_with_loss_and_rate(run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setattr(report, "tqdm", lambda **options: bars.append(tqdm(mininterval=0, **options)) or bars[-1])
    from tqdm import tqdm
    bars = []
    status, out, err = run("--batch-size", "10")
    assert (status, err) == (0, [])
    text = "\n".join(out)
    assert re.search(r"epoch 1/2: +\d+%.*\d.*digits/s, loss=\d\.\d{3}", text)
    assert len(bars) == 2
    assert all(bar.n == 90 and bar.disable for bar in bars), "each bar is full and closed"
    assert re.search(r"epoch 2/2  loss \d\.\d{4}  accuracy", text)


# --- processes ------------------------------------------------------------------------------------------------------


def process(*arguments, **options):
    return subprocess.Popen([sys.executable, "-m", "ms_accum", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": str(Path(ms_accum.__file__).parent.parent)}, **options)


def test_help_and_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ms_accum {ms_accum.__version__}\n"
    assert cli.main(["mnist", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in ("data", "batch-size", "accumulate-step", "epochs", "lr", "momentum", "optimizer", "clip-norm", "seed",
                   "device-target", "mode", "json", "plot", "save", "compare"):
        assert f"--{option} " in text
    for default in ("embedded", "32", "2", "3", "0.01", "sgd", "42", "CPU", "graph"):
        assert f"(default: {default})" in text
    assert cli.main(["--help"]) == 0
    assert "mnist" in capsys.readouterr().out


LOUD = """
import sys
from mindspore import nn, ops

def chatter():
    for _ in range(10_000):
        print("what a user's code prints")

def when_made():
    chatter()

def when_run():
    def forward_fn(x):
        chatter()
        return network(x).mean()
    network = nn.Dense(1, 1)
    return forward_fn, network, (ops.ones((4, 1)),)

if "loud:when_imported" in sys.argv:
    chatter()
"""


@pytest.mark.parametrize(("lines", "arguments"), [
    (2, ["mnist", *QUICK]), (0, ["--version"]), (2, ["plan", "loud:when_imported", "--batch-size", "1"]),
    (2, ["check", "loud:when_imported"]), (2, ["check", "loud:when_made"]), (2, ["check", "loud:when_run"]),
], ids=["mnist", "version", "plan", "check, imported", "check, made", "check, run"])
def test_a_closed_pipe_ends_the_command_without_a_word(lines, arguments, digits, monkeypatch):
    """As in `ms-accum mnist | head -2`; --version is only written when the interpreter exits."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    Path("loud.py").write_text(LOUD, encoding="utf-8")
    with process(*arguments, *(["--data", digits] if arguments[0] == "mnist" else [])) as running:
        for _ in range(lines):
            assert running.stdout.readline()
        running.stdout.close()
        error = running.stderr.read()
    assert [line for line in error.splitlines() if "[WARNING]" not in line] == []
    assert running.returncode == 141


# In epoch 2, MindSpore's own handler is in place, which turns SIGINT into SIGTERM.
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_process(digits, stop):
    with process("mnist", "--data", digits, *QUICK, "--epochs", "100000", "--json", "run.json") as running:
        while not running.stdout.readline().startswith("epoch 2/100000"):
            assert running.poll() is None
        running.send_signal(stop)
        _, error = running.communicate(timeout=60)
    assert running.returncode == 130
    # MindSpore may add a line of its own, if it was just making a Tensor.
    assert [line for line in error.splitlines() if "[WARNING]" not in line] == ["ms-accum: interrupted"]
    assert os.listdir() == []
