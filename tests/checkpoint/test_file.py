"""The file of a checkpoint: entries held against `mindspore.load_checkpoint`, forged files, memory."""
import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ms_accum import CheckpointError
from ms_accum.checkpoint.file import read_file, write_file

DTYPES = (ms.bool_, ms.uint8, ms.int8, ms.uint16, ms.int16, ms.uint32, ms.int32, ms.uint64, ms.int64, ms.float16,
          ms.bfloat16, ms.float32, ms.float64, ms.complex64, ms.complex128)
SHAPES = (), (1,), (7,), (3, 5), (2, 3, 400), (0,), (3, 0, 2)
ABOUT = {"extra": None}
PATH = Path("c.safetensors")


def made(seed):
    """A Tensor of each dtype and shape, by name."""
    rng = np.random.default_rng(seed)
    return {f"{dtype}.{shape}": Tensor(np.abs(rng.normal(size=shape) * 40).astype(np.float32)).astype(dtype)
            for dtype in DTYPES for shape in SHAPES}


def saved(path=PATH, seed=0, **about):
    """Save what `made` makes at `path`, and return it."""
    tensors, path = made(seed), path.resolve()
    write_file(path, {name: tensor.asnumpy() for name, tensor in tensors.items()}, {**ABOUT, **about})
    return tensors


def bits(tensors):
    return {name: (str(t.dtype), tuple(t.shape), t.asnumpy().tobytes()) for name, t in tensors.items()}


def read(path=PATH):
    """Read all entries and the description of a file."""
    with ExitStack() as opened:
        entries, about = read_file(path, opened)
        tensors = {name: Tensor.from_numpy(entry.read()) for name, entry in entries.items()}
        assert {name: (str(e.dtype), e.shape) for name, e in entries.items()} == {
            name: (str(t.dtype).lower(), tuple(t.shape)) for name, t in tensors.items()}
        return tensors, about


def test_entries_come_back_and_mindspore_loads_them():
    """Every bit, dtype and shape. MindSpore has no complex numbers in this format: they are pairs of floats there."""
    kept = bits(saved(extra={"epoch": 3}))
    found, about = read()
    assert bits(found) == kept
    assert about["extra"] == {"epoch": 3}
    assert bits(made(1)) != kept  # control
    loaded = ms.load_checkpoint(str(PATH), format="safetensors")
    pairs = {name for name in kept if name.startswith("Complex")}
    assert bits({name: p for name, p in loaded.items() if name not in pairs}) == {
        name: value for name, value in kept.items() if name not in pairs}
    assert {name: loaded[name].asnumpy().tobytes() for name in pairs} == {name: kept[name][2] for name in pairs}
    assert tuple(loaded["Complex64.(3, 5)"].shape) == (3, 5, 2)


def test_a_file_that_is_cut_is_never_read():
    saved()
    whole, cut = PATH.read_bytes(), Path("d.safetensors")
    for end in range(0, len(whole), 997):
        cut.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"d\.safetensors is truncated, damaged or not in the format saf"):
            read(cut)
    cut.write_bytes(whole)
    read(cut)  # control


def parts_of(path):
    """The header of a file as JSON, and its data."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:start]), raw[start:]


def put(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def sealed(path, text, arrays):
    """Write a checkpoint with this description and the SHA-256 that it needs."""
    digest = sha256(text.encode())
    for name, values in sorted(arrays.items()):
        digest.update(repr((name, values.dtype.name, values.shape)).encode() + values.tobytes())
    save_file(arrays, path, {"ms_accum": text, "ms_accum.sha256": digest.hexdigest()})


def arrays():
    return {"a": np.arange(4, dtype=np.float32).reshape(2, 2), "b": np.arange(4, 8, dtype=np.float32).reshape(2, 2),
            "c": np.arange(3, dtype=np.int64)}


def described(**changes):
    return json.dumps({"version": 7, "complex": [], **ABOUT, **changes})


HEADERS = {  # what is changed in the header, in which the data of c, a and b follow each other
    "beyond the file": lambda header: header["b"].update(shape=[2, 3], data_offsets=[40, 64]),
    "another length": lambda header: header["b"].update(shape=[3]),
    "a hole": lambda header: header["a"].update(shape=[3], data_offsets=[28, 40]),
    "overlapping": lambda header: header["b"].update(shape=[2, 3], data_offsets=[32, 56]),
    "the same bytes": lambda header: header["b"].update(data_offsets=header["a"]["data_offsets"]),
    "in the header": lambda header: header["c"].update(data_offsets=[-8, 24]),
    "backwards": lambda header: header["b"].update(data_offsets=[56, 40]),
    "negative axes": lambda header: header["b"].update(shape=[-2, -2]),
    "too large a shape": lambda header: header["b"].update(shape=[2**62, 2**62]),
    "bytes left": lambda header: header.pop("b"),
    "float places": lambda header: header["b"].update(data_offsets=[40.0, 56.0]),
    "float axes": lambda header: header["b"].update(shape=[2.0, 2]),
    "an unknown dtype": lambda header: header["b"].update(dtype="F7"),
    "no place": lambda header: header["b"].pop("data_offsets"),
    "another kind of entry": lambda header: header.update(b=7),
    "another kind of metadata": lambda header: header.update(__metadata__={"ms_accum": 7}),
}
DAMAGED = {  # a right file for the library: the SHA-256 has to find it
    "swapped entries": lambda header: header.update(a=header["b"], b=header["a"]),
    "another name": lambda header: header.update(d=header.pop("b")),
    "another dtype": lambda header: header["b"].update(dtype="I32"),
    "another shape": lambda header: header["b"].update(shape=[4, 1]),
    "an entry more": lambda header: header.update(d={"dtype": "F32", "shape": [0], "data_offsets": [56, 56]}),
    "two of one": lambda header: header.update(a={**header["a"], "shape": [2, 1], "data_offsets": [24, 32]},
                                               d={**header["a"], "shape": [2, 1], "data_offsets": [32, 40]}),
    "another description": lambda header: header["__metadata__"].update(ms_accum=described(extra=1)),
    "another file's SHA-256": lambda header: header["__metadata__"].update({"ms_accum.sha256": "0" * 64}),
    "no SHA-256": lambda header: header["__metadata__"].pop("ms_accum.sha256"),
}


@pytest.mark.parametrize("case", [*HEADERS, *DAMAGED])
def test_a_forged_header_raises_before_a_value_is_returned(case):
    """Control: the same maker without a change."""
    sealed(PATH, described(), arrays())
    header, data = parts_of(PATH)
    put(PATH, header, data)
    assert read()[0]["b"].asnumpy().tolist() == [[4, 5], [6, 7]]
    assert [header[name]["data_offsets"] for name in "cab"] == [[0, 24], [24, 40], [40, 56]]
    {**HEADERS, **DAMAGED}[case](header)
    put(PATH, header, data)
    message = "truncated, damaged or not in the format" if case in HEADERS else r"damaged \(SHA-256 mismatch\); restore"
    with pytest.raises(CheckpointError, match=rf"c\.safetensors is {message}"):
        read()


@pytest.mark.parametrize("raw", [b"", b"1234567", (2**63).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") +
                                 b"[]", (4).to_bytes(8, "little") + b"{\xff\xff}", b"\0" * 8, b"[" * 10**6])
def test_what_is_no_safetensors_file_raises(raw):
    PATH.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"c\.safetensors is truncated, damaged or not in the format safetensors"):
        read()


def test_two_entries_of_one_name_are_never_read():
    """JSON with a key twice: the library reads one of them, and the SHA-256 fails, or raises."""
    sealed(PATH, described(), arrays())
    header, data = parts_of(PATH)
    text = json.dumps(header).replace('"b":', '"a":', 1).encode()
    PATH.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(CheckpointError, match=r"c\.safetensors is (truncated, )?damaged"):
        read()


class Malice:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(("text", "said"), [
    ("", "JSONDecodeError"), ("[]", "TypeError"), ("{}", "KeyError: 'version'"), ("[" * 10**5, "RecursionError"),
    (pickle.dumps(Malice(), 0).decode(), "JSONDecodeError"),
    (described(complex=["d"]), "KeyError: 'd'"),
    (described(complex=["c"]), "c has 3 numbers in place of a complex one, expected 2"),
    (described(complex=["i"]), "KeyError: 'int64'"), (described(complex=["s"]), "ValueError: not enough values"),
    (described(complex=["a", "a"]), "KeyError: 'complex64'"), (described(complex=7), "TypeError"), (described(), None)])
def test_a_forged_description_raises(text, said):
    """Under a right SHA-256. Nothing is executed; controls: the pickle would have been, and a right description."""
    sealed(PATH, text, {**arrays(), "i": np.zeros((2, 2), np.int64), "s": np.array(1, np.float32)})
    if said is None:
        read()
        pickle.loads(pickle.dumps(Malice(), 0))
        assert os.path.exists("executed")
        return
    with pytest.raises(CheckpointError, match=rf"c\.safetensors cannot be read \(.*{said}"):
        read()
    assert not os.path.exists("executed")


def test_a_file_of_another_version_raises():
    """A newer one here; of an older one, weights can be loaded."""
    sealed(PATH, described(version=8), arrays())
    with pytest.raises(CheckpointError, match="is of version 8, expected 7; load it with the ms_accum that wrote it"):
        read()
    sealed(PATH, described(version=6), arrays())
    assert read()[1]["version"] == 6


@pytest.mark.parametrize("change", ["written", "cut"])
def test_a_file_that_is_changed_in_place_while_it_is_read_raises(change):
    """Control: an entry that is read before."""
    saved()
    with ExitStack() as opened:
        first, *_, last = read_file(PATH, opened)[0].values()
        first.read()
        time.sleep(0.02)  # the clock of the file system
        if change == "written":
            with PATH.open("r+b") as other:
                other.write(b"1")
        else:
            os.truncate(PATH, 10)
        for entry in (first, last):
            with pytest.raises(OSError, match=r"c\.safetensors cannot be read \(.*\); load another file"):
                entry.read()


@pytest.mark.parametrize("when", ["opened", "read"])
def test_a_save_while_a_file_is_opened_or_read_does_not_change_what_is_read(when, monkeypatch):
    """Also what is written in place into the file that is read, not into the new one, is found."""
    kept = bits(saved())
    PATH.with_name("link").hardlink_to(PATH)

    def late(*arguments, **named):
        if when == "opened":
            saved(seed=1)
        return safe_open(*arguments, **named)

    with ExitStack() as opened:
        with monkeypatch.context() as patch:
            patch.setattr("ms_accum.checkpoint.file.safe_open", late)
            entries, _ = read_file(PATH, opened)
        if when == "read":
            saved(seed=1)
        assert bits({name: Tensor.from_numpy(entry.read()) for name, entry in entries.items()}) == kept
        time.sleep(0.02)  # the clock of the file system
        PATH.with_name("link").write_bytes(PATH.read_bytes())
        with pytest.raises(OSError, match="it was written while it was read"):
            next(iter(entries.values())).read()
    assert bits(read()[0]) == bits(made(1)) != kept


def test_what_is_no_array_in_a_row_is_saved_as_it_is():
    """Strides: the library would write the memory as it lies. Control: it does."""
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    save_file({"a": turned}, "plain.safetensors")
    assert load_file("plain.safetensors")["a"].tolist() != turned.tolist()
    write_file(PATH.resolve(), {"a": turned, "c": turned * 1j}, ABOUT)
    assert read()[0]["a"].asnumpy().tolist() == turned.tolist()
    assert read()[0]["c"].asnumpy().tolist() == (turned * 1j).tolist()


MEMORY = """
import re, sys
from pathlib import Path
import mindspore as ms
from mindspore import nn
from safetensors.numpy import load_file
from ms_accum import Accumulator, load_checkpoint, save_checkpoint

network = nn.SequentialCell([nn.Dense(1500, 1500, has_bias=False, weight_init="ones") for _ in range(8)])
accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="sum")

def held():
    return {name: int(kilobytes) * 1024 for name, kilobytes in
            re.findall(r"(VmHWM|VmRSS):\\s*(\\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))}

def growth(do):
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak becomes what is held now
    before = held()["VmRSS"]
    do()
    return held()["VmHWM"] - before

def save():
    save_checkpoint("c.safetensors", network, accumulator)

def load():
    load_checkpoint("c.safetensors", network, accumulator)

save()
load()  # MindSpore allocates state at its first use
print(growth(save), growth(load), growth(lambda: load_file("c.safetensors")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory cannot be reset")
def test_memory_grows_by_one_entry_at_most():
    """Control: the library's own loading of all entries."""
    # As users run it: MindSpore queues its kernels. What is freed goes back to the system at once.
    environment = {name: value for name, value in os.environ.items() if name != "MS_DEV_HOST_BLOCKING_RUN"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    said = subprocess.run([sys.executable, "-c", MEMORY], env=environment, capture_output=True, text=True,
                          check=True).stdout
    save, load, whole = map(int, said.split())
    size = PATH.stat().st_size
    with safe_open(PATH, "np") as file:
        largest = max(file.get_tensor(name).nbytes for name in file.keys())
    assert size > 20 * largest
    assert save <= 0.1 * size
    assert 0.9 * largest <= load <= 1.1 * largest  # and the lists of names and places
    assert whole >= 0.9 * size
