"""`ms-accum lm`: what it prints, what it writes, what it refuses and how."""
import json
import os
import re
from pathlib import Path

import mindspore as ms
import pytest
import tiny

from ms_accum.cli import lm as command
from ms_accum.cli import main as cli
from ms_accum.lm import data
from ms_accum.lm.settings import Settings
from ms_accum.reference import figures, train

# Op by op: each graph takes seconds to compile.
QUICK = ("--mode", "pynative", "--batch-size", "4", "--epochs", "2", "--lr", "0.01")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `ms-accum lm` with a small network on a small text in this process: (status, lines of stdout, lines of stderr)."""
    tiny.shrink(monkeypatch)
    Path("text").write_bytes(tiny.text())

    def run_lm(*arguments, text="text"):
        status = cli.main(["lm", "--text", text, *QUICK, *arguments])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()
    return run_lm


def read(name):
    return json.loads(Path(name).read_text())


def lines_of_a_run():
    """Patterns of what the next test's run prints."""
    text = tiny.split()
    lines = ["versions   ms_accum .*",
             r"device     CPU, \d+ CPU cores, pynative mode, make_train_step, gradients in float32",
             rf"data       text: 18 documents of {text.train.size:,} bytes to train on, 2 of {text.validation.size} to validate on; "
             rf"{text.train.entropy():.2f} bits for a byte by itself",
             "batch      4 x 3 = 12 rows an update",
             "optimizer  adam, learning rate 0.01, clipped to norm 1, seed 42"]
    for epoch in (1, 2):
        lines += [rf"epoch {epoch}/2  [\d,]+ bytes  loss \d\.\d{{4}}  [\d,]+ bytes/s"] * (figures.PROGRESS_LINES - 1)
        lines += [rf"epoch {epoch}/2  loss \d\.\d{{4}}  validation \d\.\d{{4}} bits per byte  "
                  r"train \d+\.\d\d s  test \d+\.\d\d s  noise scale [\d,]+ bytes"]
    return [*lines, r"critical batch size about [\d,]+ bytes, .* of an update: a .*", "generated  .+", "wrote run.json", "wrote run.png"]


def test_a_run_prints_and_writes_every_figure_and_option(run):
    status, out, err = run(*"--accumulate-step 3 --noise-scale --json run.json --plot run.png".split())
    assert (status, err) == (0, [])
    lines = lines_of_a_run()
    assert len(out) == len(lines)
    assert [line for line, expected in zip(out, lines) if not re.fullmatch(expected, line)] == []
    result = read("run.json")
    assert f"validation {result['validation']:.4f} bits" in out[-5]
    assert [epoch["validation"] for epoch in result["epochs"]][-1] == result["validation"]
    assert result["epochs"][1]["loss"] < result["epochs"][0]["loss"]
    assert out[-3] == f"generated  {result['generated']}"
    text = tiny.split()
    assert result["data"] == {
        "source": "text", "train_documents": 18, "train_bytes": text.train.size, "validation_documents": 2,
        "validation_bytes": text.validation.size, "entropy": text.train.entropy()}
    assert result["options"]["accumulate_step"] == result["accumulate_step"] == 3
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")


def test_every_option_arrives_in_the_settings(monkeypatch):
    def settings(line):
        return command.prepare(cli._parser().parse_args(["lm", *line.split()])).settings

    tiny.shrink(monkeypatch)
    assert settings("") == Settings()
    assert settings("--batch-size 8 --accumulate-step 3 --epochs 4 --lr 0.5 --clip-norm inf --seed 0 --mode pynative "
                    "--pieces 2 --noise-scale --budget 100") == Settings(
        batch_size=8, accumulate_step=3, epochs=4, lr=0.5, clip_norm=float("inf"), seed=0, mode="pynative", pieces=2,
        noise_scale=True, budget=100)


def test_compare_trains_with_the_mean_of_means_too(run, monkeypatch):
    from matplotlib.figure import Figure
    drawn, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **look: drawn.append(figure) or savefig(figure, path, **look))
    status, out, _ = run("--compare", "--json", "run.json", "--plot", "run.png")
    assert status == 0
    result = read("run.json")
    means = result["mean_of_means"]
    assert result["validation"] != means["validation"]
    assert result["update_step"] == means["update_step"]
    difference = means["validation"] - result["validation"]
    assert out[-7:-3] == [
        f"token mean     4 x 2 = 8 rows an update: validation {result['validation']:.4f} bits per byte",
        f"mean of means  4 x 2 = 8 rows an update: validation {means['validation']:.4f} bits per byte",
        f"the mean of means needs {abs(difference):.4f} bits per byte {'more' if difference > 0 else 'fewer'} on the validation documents",
        f"largest parameter difference {result['max_parameter_difference']:.3g}"]
    assert result["max_parameter_difference"] > 1e-4
    score_axes = drawn[0].axes[1]
    assert [text.get_text() for text in score_axes.get_legend().get_texts()] == ["token mean", "mean of means"]
    for line, epochs in zip(score_axes.lines, (result["epochs"], means["epochs"]), strict=True):
        assert line.get_ydata().tolist() == [epoch["validation"] for epoch in epochs]
    assert score_axes.get_ylabel() == "bits per byte"


def test_in_documents_of_one_length_the_mean_of_means_is_the_mean(run):
    """Control: nothing but the weights sets the two apart."""
    Path("even").write_text("\n\n".join(f"{i:030}" for i in range(44)))  # 40 to train on: ten full microbatches
    assert run("--compare", "--json", "run.json", text="even")[0] == 0
    assert read("run.json")["max_parameter_difference"] < 1e-4


def test_a_run_that_stopped_in_an_epoch_resumes_bit_identically(run, monkeypatch):
    assert run("--save", "whole.ckpt", "--json", "whole.json")[0] == 0

    def killed(*arguments, **options):
        save(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        save = train.save_checkpoint
        patch.setattr(train, "save_checkpoint", killed)
        assert run("--save", "c.ckpt", "--save-every", "7")[0] == 130
    status, out, err = run("--resume", "c.ckpt", "--save", "c.ckpt", "--json", "c.json")
    assert (status, err) == (0, [])
    resumed = next(line for line in out if line.startswith("resumed"))
    assert re.fullmatch(r"resumed    c.ckpt: \d epochs and [1-7] microbatches done", resumed)
    one, other = read("c.json"), read("whole.json")
    assert [(epoch["loss"], epoch["validation"]) for epoch in one["epochs"]] == [
        (epoch["loss"], epoch["validation"]) for epoch in other["epochs"]]
    assert one["generated"] == other["generated"]
    trained, whole = (ms.load_checkpoint(f"{name}.ckpt") for name in ("c", "whole"))
    assert trained.keys() == whole.keys()
    for name in trained:
        if name != "ms_accum":  # which holds the seconds that epochs took
            assert trained[name].asnumpy().tobytes() == whole[name].asnumpy().tobytes(), name
    for options, message in [(["--budget", "100"], "from a run with budget None, but this run has 100"),
                             (["--lr", "0.5"], "from a run with lr 0.01, but this run has 0.5; give the same options and rows")]:
        status, _, err = run("--resume", "c.ckpt", *options)
        assert (status, len(err)) == (1, 1)
        assert message in err[0]


def test_windows_close_by_a_budget_of_bytes(run):
    status, out, _ = run("--budget", "300", "--json", "run.json")
    assert status == 0
    assert "batch      microbatches of 4 rows until they hold 300 bytes" in out
    size = tiny.split().train.size
    assert read("run.json")["effective_batch"] is None
    assert size / 600 < read("run.json")["update_step"] / 2 <= size / 300 + 1


def test_windows_follow_the_noise_scale(run):
    """The length stands beside each loss; a run that is resumed across a change is the same one."""
    options = ("--accumulate-step", "adaptive", "--batch-size", "1")
    status, out, err = run(*options, "--epochs", "6", "--json", "run.json", "--plot", "run.png", "--save", "whole.ckpt")
    assert (status, err) == (0, [])
    assert "batch      1 x 1 to 64 rows an update, as the noise scale asks" in out
    lengths = [int(line.rpartition("  window ")[2].split()[0]) for line in out if line.startswith("epoch ")]
    assert lengths[0] <= 2 < max(lengths)  # of 1, some are 2 to measure
    result = read("run.json")
    assert (result["accumulate_step"], result["effective_batch"]) == ("adaptive", None)
    assert [epoch["window_length"] for epoch in result["epochs"]] == lengths[figures.PROGRESS_LINES - 1::figures.PROGRESS_LINES]
    change = next(i for i, (one, other) in enumerate(zip(result["epochs"], result["epochs"][1:]))
                  if one["window_length"] != other["window_length"])
    assert run(*options, "--epochs", str(change + 1), "--save", "half.ckpt")[0] == 0
    assert run(*options, "--epochs", "6", "--resume", "half.ckpt", "--save", "half.ckpt")[0] == 0
    half, whole = (ms.load_checkpoint(f"{name}.ckpt") for name in ("half", "whole"))
    assert {name: p.asnumpy().tobytes() for name, p in half.items() if name != "ms_accum"} == {
        name: p.asnumpy().tobytes() for name, p in whole.items() if name != "ms_accum"}


@pytest.mark.parametrize(("arguments", "match"), [
    ("--accumulate-step fast", r"argument --accumulate-step: expected a whole number from 1 to 2147483647, or adaptive, got 'fast'"),
    ("--accumulate-step adaptive --compare", r"argument --compare: needs windows of one length; leave out --accumulate-step adaptive"),
    ("--accumulate-step adaptive --budget 99", r"argument --budget: closes windows by their weight, .*; leave out one of --budget and"),
    ("--text nowhere", r"argument --text: there is no file nowhere; give excerpt, topics or a file"),
    ("--text short", r"argument --text: short holds 1 different documents, expected at least 10; separate them by empty lines"),
    ("--text .", r"argument --text: there is no file \.; give"),
    ("--budget 0", r"argument --budget: expected a whole number from 1 to \d+, got '0'"),
    ("--budget 100 --compare", r"argument --compare: the mean of means gives each microbatch the weight 1, which counts no bytes; leave"),
    ("--batch-size 99", r"argument --batch-size: a microbatch of 99 rows cannot be filled from \d+; choose at most \d+"),
    ("--noise-scale --accumulate-step 1", r"argument --noise-scale: compares the microbatches of a window, which holds only one"),
    ("--save-every 3", r"argument --save-every: requires --save FILE\.ckpt"),
    ("--plot run.jpg", r"argument --plot: run\.jpg does not end in \.png; name the file run\.png"),
    ("--momentum 0.5", r"unrecognized arguments: --momentum 0.5"),
])
def test_a_bad_value_is_refused_in_one_line_before_training(run, monkeypatch, arguments, match):
    Path("short").write_text("one paragraph")
    monkeypatch.setattr(train, "train", None)
    status, out, err = run(*arguments.split())
    assert (status, out) == (2, [])
    assert len(err) == 1
    assert re.match(rf"ms-accum( lm)?: error: {match}", err[0])
    assert sorted(os.listdir()) == ["short", "text"]


def test_a_checkpoint_of_another_command_is_refused(run, monkeypatch):
    assert run("--save", "c.ckpt")[0] == 0
    monkeypatch.setattr(command.Task, "command", "mnist")
    status, _, err = run("--resume", "c.ckpt")
    assert status == 1
    assert "the checkpoint is from a run with command lm, but this run has mnist" in err[0]


@pytest.mark.slow
def test_the_default_run_ends_well_below_the_entropy_of_single_bytes(capsys):
    assert cli.main(["lm", "--json", "run.json"]) == 0
    result = read("run.json")
    assert result["data"]["source"] == "excerpt"
    assert result["data"]["entropy"] == data.load("excerpt", 42).train.entropy() > 4.5
    assert result["validation"] < result["data"]["entropy"] - 1
    bits = [epoch["validation"] for epoch in result["epochs"]]
    assert bits == sorted(bits, reverse=True)
    assert "generated  " in capsys.readouterr().out
