"""tutorials/mnist: what the script learns and prints, how it resumes, what the comparison finds; and its data."""
import gzip
import hashlib
import re
import shutil
import struct
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from support.mnist_files import NAMES, embedded_set, idx, random_set, write
from support.scripts import ROOT, TUTORIALS, module, run, run_here, saved, start

data = module("mnist", "data")
# 90 digits in microbatches of 16: five full ones and one of 10; with windows of 4, the last one is of 2.
SMALL = ("--data", "digits", "--batch-size", "16", "--accumulate-step", "4", "--lr", "0.1")
EPOCH = r"epoch {}/\d+  accuracy \d+\.\d\d %"


@pytest.fixture(autouse=True)
def _digits(_scratch_folder):
    write(Path("digits"), embedded_set(90, 50))


@pytest.mark.slow
def test_the_first_command_of_the_readme_learns_digits():
    """With all defaults."""
    lines = run("mnist").splitlines()
    epochs = [line for line in lines if line.startswith("epoch")]
    assert [line for i, line in enumerate(epochs) if not re.fullmatch(EPOCH.format(i + 1), line)] == []
    accuracies = [float(re.search(r"accuracy (\S+)", line)[1]) for line in epochs]
    assert len(accuracies) == 3
    assert accuracies[0] < accuracies[1] < accuracies[2] == pytest.approx(85, abs=1.5)
    assert lines[-1] == epochs[-1]
    others = [line for line in lines if line not in epochs]
    assert len(others) == 3 * 157 // 50
    assert all(re.fullmatch(r"update \d+  loss \d\.\d{4}  [\d,]+ digits/s", line) for line in others)


def test_it_is_resumed_bit_identically(uncompiled, capsys):
    """Control: what is resumed is not the end."""
    run_here("mnist", *SMALL, "--epochs", "2", "--save", "run.safetensors")
    before, first = saved("run.safetensors"), capsys.readouterr().out
    run_here("mnist", *SMALL, "--epochs", "4", "--save", "run.safetensors")
    second = capsys.readouterr().out
    run_here("mnist", *SMALL, "--epochs", "4", "--save", "whole.safetensors")
    assert (first + second).replace("/2 ", "/4 ") == capsys.readouterr().out
    assert saved("run.safetensors") == saved("whole.safetensors") != before


@pytest.mark.slow
def test_a_killed_run_is_resumed_bit_identically():
    """After kill -9, as if it had never stopped. Control: what the killed run left is not the end."""
    with start("mnist", *SMALL, "--epochs", "100000", "--save", "run.safetensors") as running:
        while not running.stdout.readline().startswith("epoch 3/"):
            assert running.poll() is None, running.stderr.read()
        running.kill()
        *_, last = ["epoch 3/", *re.findall(r"^epoch \d+/", running.stdout.read(), re.MULTILINE)]
    left, epochs = saved("run.safetensors"), str(int(re.search(r"\d+", last)[0]) + 2)
    resumed, whole = (run("mnist", *SMALL, "--epochs", epochs, "--save", name)
                      for name in ("run.safetensors", "whole.safetensors"))
    assert re.findall("^epoch.*", whole, re.MULTILINE)[-2:] == re.findall("^epoch.*", resumed, re.MULTILINE)[-2:]
    assert saved("run.safetensors") == saved("whole.safetensors") != left


MISTAKE = "def alike(*batch):\n    return 1.0\n\n\n"


@pytest.mark.parametrize(("mistake", "least", "most"), [("", 0, 1e-7), (MISTAKE, 1e-4, 1)])
def test_the_comparison_finds_equal_parameters_unless_there_is_a_mistake(
        tmp_path, capsys, uncompiled, mistake, least, most):
    """The mistake, in a copy of the script: all microbatches weigh the same, also those of 10 digits.

    With unequal microbatches, sums of gradients in float64 are divided by a sum of weights in float32.
    """
    copy = shutil.copytree(TUTORIALS / "mnist", tmp_path / "copy", ignore=shutil.ignore_patterns("digits"))
    source = (copy / "compare.py").read_text(encoding="utf-8")
    if mistake:
        source = source.replace("reducer=", "weight_fn=alike, reducer=").replace("def build", f"{mistake}def build")
    (copy / "compare.py").write_text(source, encoding="utf-8")
    histories = run_here(copy, *SMALL, "--plot", "run.png", script="compare.py")["histories"]
    line = capsys.readouterr().out
    found = re.fullmatch(r"accumulated: accuracy \d+\.\d\d %; undivided: \d+\.\d\d %; the largest difference between "
                         r"parameters is (\S+)\n", line)
    assert least <= float(found[1]) <= most
    assert [(len(losses), len(accuracies)) for _, losses, accuracies in histories.values()] == [(6, 3)] * 2
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")


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


def test_without_a_network_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(data, "download", Mock(side_effect=RuntimeError("no\nnetwork")))
    with pytest.raises(OSError, match=r"could not download \S+MNIST_Data\.zip \(no network\); use --data embedded"):
        data.load("full")


IMAGES = np.zeros((7, 28, 28), np.uint8)
PACKED = gzip.compress(idx(IMAGES), mtime=0)  # part of the names of tests
NO_IDX = r"train-images-idx3-ubyte is not a complete idx file of n x 28 x 28 bytes: it holds {} bytes, and "


@pytest.mark.parametrize(("name", "content", "match"), [
    (NAMES[0], b"", NO_IDX.format(0)),
    (NAMES[0], idx(IMAGES)[:-1], NO_IDX.format(5503)),
    (NAMES[0], idx(IMAGES[:, 1:]), NO_IDX.format(16 + 7 * 27 * 28)),
    (NAMES[0], b"\1" + idx(IMAGES)[1:], NO_IDX.format(5504)),
    (NAMES[0], struct.pack(">4I", 2051, 2**32 - 1, 28, 28), NO_IDX.format(16)),
    (f"{NAMES[0]}.gz", PACKED[:-20], "is not a complete gzip file"),
    (f"{NAMES[0]}.gz", PACKED[:10] + b"\xff" + PACKED[11:], "is not a complete gzip file"),
    (NAMES[3], None, r"t10k-labels-idx1-ubyte \(or t10k-labels-idx1-ubyte\.gz\) is missing; give a folder"),
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
        assert len((TUTORIALS / folder / "train.py").read_text(encoding="utf-8").splitlines()) <= 95
    files = [path for path in (ROOT / "ms_accum").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} <= {".py", ".typed"}
    source = "".join(path.read_text(encoding="utf-8") for path in files if path.suffix == ".py")
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", source, re.MULTILINE))
    assert {"numpy", "mindspore"} <= imported
    assert not imported & {"tutorials", "mnist", "lm", "download", "data", "network"}
