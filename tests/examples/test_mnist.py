"""tutorials/mnist: what the script learns, prints and draws, how it resumes, what it rejects; and its data."""
import ast
import gzip
import hashlib
import re
import shutil
import struct
from pathlib import Path
from unittest.mock import Mock

import matplotlib.figure
import mindspore as ms
import numpy as np
import pytest
from support.mnist_files import NAMES, embedded_set, idx, random_set, write
from support.scripts import ROOT, TUTORIALS, module, run, run_here, start

data = module("mnist", "data")
# 90 digits in microbatches of 16: five full ones and one of 10; with windows of 4, the last one is of 2.
SMALL = ("--data", "digits", "--batch-size", "16", "--accumulate-step", "4")
EPOCH = r"epoch {}/\d+  loss \d\.\d{{4}}  accuracy \d+\.\d\d %"


@pytest.fixture(autouse=True)
def _digits(_scratch_folder):
    write(Path("digits"), embedded_set(90, 50))


def parameters(path):
    """The bytes of all that a checkpoint holds, but for its description."""
    found = ms.load_checkpoint(path, format="safetensors")
    return {name: value.asnumpy().tobytes() for name, value in found.items() if name != "ms_accum"}


@pytest.mark.slow
def test_the_first_command_of_the_readme_learns_digits():
    """With all defaults. On another processor, the last digits of the loss differ."""
    first, *epochs = run("mnist").splitlines()
    assert first.startswith("10,000 digits to train on, 2,000 to test on; an update takes 32 x 2 microbatches")
    assert [line for i, line in enumerate(epochs) if not re.fullmatch(EPOCH.format(i + 1), line)] == []
    accuracies = [float(re.search(r"accuracy (\S+)", line)[1]) for line in epochs]
    assert len(accuracies) == 3
    assert accuracies[0] < accuracies[1] < accuracies[2] == pytest.approx(85, abs=1.5)


@pytest.mark.slow
def test_a_killed_run_is_resumed_bit_identically():
    """After kill -9, as if it had never stopped. Control: what the killed run left is not the end."""
    with start("mnist", *SMALL, "--epochs", "100000", "--save", "run.safetensors") as running:
        while not running.stdout.readline().startswith("epoch 3/"):
            assert running.poll() is None, running.stderr.read()
        running.kill()
        *_, last = ["epoch 3/", *re.findall(r"^epoch \d+/", running.stdout.read(), re.MULTILINE)]
    left = parameters("run.safetensors")
    epochs = str(int(re.search(r"\d+", last)[0]) + 2)
    resumed = run("mnist", *SMALL, "--epochs", epochs, "--resume", "run.safetensors", "--save", "run.safetensors")
    whole = run("mnist", *SMALL, "--epochs", epochs, "--save", "whole.safetensors")
    assert 2 <= len(resumed.splitlines()[1:]) <= 3
    assert whole.splitlines()[-2:] == resumed.splitlines()[-2:]
    assert parameters("run.safetensors") == parameters("whole.safetensors") != left


MISTAKE = """
def all_alike(images, labels):
    return 1.0


train_step = ms_accum.make_train_step(forward_fn, optimizer, args.accumulate_step, weight_fn=all_alike)
"""


@pytest.mark.parametrize(("mistake", "least", "most"), [(False, 0, 1e-6), (True, 1e-4, 1)])
def test_compare_finds_equal_parameters_unless_the_script_has_a_mistake(
        tmp_path, capsys, uncompiled, mistake, least, most):
    """The mistake, in a copy of the script: all microbatches weigh the same, also those of 10 digits."""
    copy = shutil.copytree(TUTORIALS / "mnist", tmp_path / "copy", ignore=shutil.ignore_patterns("digits"))
    source = (copy / "train.py").read_text(encoding="utf-8")
    call = re.search(r"^train_step = .*\n", source, re.MULTILINE)[0]
    (copy / "train.py").write_text(source.replace(call, MISTAKE) if mistake else source, encoding="utf-8")
    run_here(copy, *SMALL, "--compare", "--lr", "0.1", "--plot", "run.png")
    *_, last = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"undivided batches: accuracy \d+\.\d\d %; the largest difference between parameters is (\S+)",
                         last)
    assert least <= float(found[1]) <= most
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("folder", "score", "loss_label", "score_label"), [
    ("mnist", "accuracy", "training loss (cross entropy in nats)", "test accuracy (%)"),
    ("lm", "validation", "training loss (bits per byte)", "validation (bits per byte)")])
def test_the_plot_has_a_line_of_losses_over_updates_and_axes_with_names_and_units(
        monkeypatch, folder, score, loss_label, score_label):
    drawn = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, path: drawn.append((self, path)))
    losses = np.linspace(4, 1, 60)
    histories = {"one": {"loss": losses.tolist(), score: [50.0, 75.0]}, "two": {"loss": [2.0], score: [60.0]}}
    module(folder, "plot").plot("run.png", histories)
    (figure, path), = drawn
    assert path == "run.png"
    left, right = figure.axes
    assert (left.get_xlabel(), left.get_ylabel()) == ("update", loss_label)
    assert (right.get_xlabel(), right.get_ylabel()) == ("epoch", score_label)
    each, mean = left.lines[:2]
    np.testing.assert_allclose(each.get_xydata(), np.stack([np.arange(1, 61), losses], axis=1))
    np.testing.assert_allclose(mean.get_xydata(), np.stack([np.arange(2, 61), (losses[1:] + losses[:-1]) / 2], axis=1))
    assert {(line.get_linestyle(), line.get_marker()) for line in (each, mean)} == {("-", "None")}
    assert right.lines[0].get_xydata().tolist() == [[1, 50.0], [2, 75.0]]
    assert [text.get_text() for axes in (left, right) for text in axes.get_legend().get_texts()] == [
        "one, mean of 2 updates", "two, mean of 1 updates", "one", "two"]


@pytest.mark.parametrize(("arguments", "match"), [
    ("--batch-size 0", "argument --batch-size: got 0, expected a number above 0"),
    ("--epochs 2.5", "argument --epochs: invalid int value: '2.5'"),
    ("--lr nan", "argument --lr: got nan, expected a number above 0"),
    ("--compare --save run.safetensors", "argument --compare: it trains twice on one device; leave out --save"),
    ("--plot missing/run.png", r"missing/run\.png is in a folder that does not exist; make the folder first"),
    ("--resume missing.safetensors", r"there is no checkpoint \S+missing\.safetensors; give a file"),
    ("--resume other.safetensors", r"other\.safetensors is from a run with .*'seed': 7.*, but this run has .*42"),
    ("--data nowhere", r"nowhere/train/train-images-idx3-ubyte .* is missing; give a folder"),
    ("--data full", r"could not download https://\S+MNIST_Data\.zip \(no network\); use --data embedded"),
])
def test_wrong_arguments_are_an_error_in_one_line(monkeypatch, capsys, uncompiled, arguments, match):
    """There is no network. Control: with the options of its run, a file is resumed."""
    monkeypatch.setattr("download.download", Mock(side_effect=RuntimeError("no\nnetwork")))
    if "other" in arguments:
        run_here("mnist", *SMALL, "--epochs", "1", "--seed", "7", "--save", "other.safetensors")
        resumed = run_here("mnist", *SMALL, "--epochs", "1", "--seed", "7", "--resume", "other.safetensors")
        assert len(resumed["history"]["accuracy"]) == 1
        assert "finished: accuracy " in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        run_here("mnist", *SMALL, *arguments.split())
    printed, said = capsys.readouterr()
    assert (stopped.value.code, printed) == (2, "")
    assert re.fullmatch(rf"usage: train.py \[options\]\ntrain.py: error: {match}.*\n", said)


# --- data -------------------------------------------------------------------------------------------------------------


def test_embedded_digits_are_the_first_of_the_real_files():
    digits, test = data.load("embedded")
    assert (digits.images.shape, test.images.shape) == ((10_000, 28, 28), (2_000, 28, 28))
    for some in (digits, test):
        assert (some.images.dtype, some.labels.dtype, some.labels.shape) == (np.uint8, np.int32, (len(some),))
    assert digits.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]  # well known
    # md5 of the real files, cut after 10,000 and 2,000 items and with that count in the header.
    expected = ("63a563d3843dba5073e604e3a7990e87", "e6ef65212ddc6f9010e22d95b5269050",
                "014beca301477cb2e974ccd9bba2262c", "a82723c4f1ffcf0f0a0d4d06f6c879a0")
    for name, md5 in zip(NAMES, expected, strict=True):
        assert hashlib.md5(gzip.decompress((data.EMBEDDED / f"{name}.gz").read_bytes())).hexdigest() == md5
    assert sum(path.stat().st_size for path in data.EMBEDDED.rglob("*.gz")) <= 2_000_000
    readme = (data.EMBEDDED / "README.md").read_text(encoding="utf-8")
    credits = "LeCun", "Cortes", "Burges", "CC BY-SA 3.0", "10,000", "2,000"
    assert [word for word in credits if word not in readme] == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("nested", ["", "MNIST_Data"])
def test_a_folder_in_the_layout_of_the_tutorial(tmp_path, packed, nested):
    files = random_set()
    write(tmp_path / nested, files, packed)
    digits, test = data.load(str(tmp_path))
    assert [idx(array) for array in (digits.images, digits.labels, test.images, test.labels)] == list(files.values())


def test_the_full_set_is_downloaded_once_and_an_interrupted_download_leaves_nothing(monkeypatch):
    """In the current folder, as MindSpore's tutorial does. The archive is a small one."""
    files, asked = random_set(), []

    def download(url, path, kind, **_):
        assert (url, kind) == (data.URL, "zip")
        write(Path(path, "MNIST_Data"), files)
        asked.append(path)
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(data, "download", download)
    with pytest.raises(KeyboardInterrupt):
        data.load("full")
    assert [path.name for path in Path().iterdir()] == ["digits"]
    for _ in range(2):
        digits, _ = data.load("full")
        assert idx(digits.images) == files[NAMES[0]]
    assert len(asked) == 2
    assert sorted(path.name for path in Path().iterdir()) == ["MNIST_Data", "digits"]


IMAGES = np.zeros((7, 28, 28), np.uint8)
PACKED = gzip.compress(idx(IMAGES), mtime=0)  # part of the names of tests
NO_IDX = r"train-images-idx3-ubyte is not a complete idx file of n x 28 x 28 bytes: it holds {} bytes, and "


@pytest.mark.parametrize(("name", "content", "match"), [
    (NAMES[0], b"", NO_IDX.format(0)),
    (NAMES[0], idx(IMAGES)[:-1], NO_IDX.format(5503)),
    (NAMES[0], idx(IMAGES) + b"0", NO_IDX.format(5505)),
    (NAMES[0], idx(IMAGES[:, 1:]), NO_IDX.format(16 + 7 * 27 * 28)),
    (NAMES[0], b"\1" + idx(IMAGES)[1:], NO_IDX.format(5504)),
    (NAMES[0], struct.pack(">4I", 2051, 2**32 - 1, 28, 28), NO_IDX.format(16)),
    (f"{NAMES[0]}.gz", PACKED[:-20], "is not a complete gzip file"),
    (f"{NAMES[0]}.gz", b"no gzip" + PACKED, "is not a complete gzip file"),
    (f"{NAMES[0]}.gz", PACKED[:10] + b"\xff" + PACKED[11:], "is not a complete gzip file"),
    (NAMES[3], None, r"t10k-labels-idx1-ubyte \(or t10k-labels-idx1-ubyte\.gz\) is missing; give a folder"),
    (NAMES[1], idx(np.zeros(6)), r"train holds 7 images and 6 labels from 0 to 0, expected a label from"),
    (NAMES[1], idx(np.array([3, 10, 2, 1, 0, 0, 0])), r"train holds 7 images and 7 labels from 0 to 10, expected"),
])
def test_folders_that_hold_no_set_are_an_error(tmp_path, name, content, match):
    write(tmp_path, random_set())
    (tmp_path / name.removesuffix(".gz")).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        data.load(str(tmp_path))


def test_each_epoch_takes_every_digit_once_in_its_seeded_order():
    digits = data.load("digits")[0]
    taken = [digits.epoch(16, seed, epoch) for seed, epoch in ((42, 1), (42, 2), (7, 1))]
    assert [[len(rows) for rows in microbatches] for microbatches in taken] == [[16] * 5 + [10]] * 3
    orders = [np.concatenate(microbatches).tolist() for microbatches in taken]
    assert all(sorted(rows) == list(range(90)) for rows in orders)
    assert len({tuple(rows) for rows in orders}) == 3
    assert np.concatenate(digits.epoch(64, 42, 1)).tolist() == orders[0]


# --- the package ------------------------------------------------------------------------------------------------------


def test_scripts_are_short_and_the_package_neither_imports_them_nor_holds_data():
    for folder in ("mnist", "lm"):
        assert len((TUTORIALS / folder / "train.py").read_text(encoding="utf-8").splitlines()) <= 150
    files = [path for path in (ROOT / "ms_accum").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} <= {".py", ".typed"}
    imported = set()
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_bytes()))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add(node.module.partition(".")[0])
    assert {"numpy", "mindspore"} <= imported
    assert not imported & {"tutorials", "mnist", "lm", "download", "data", "network", "plot"}
