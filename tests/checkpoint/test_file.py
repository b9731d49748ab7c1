"""The file of a checkpoint: entries held against `mindspore.load_checkpoint`, forged files, memory."""
import json
import os
import pickle
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


def test_a_file_with_any_changed_byte_is_never_read():
    """Drawn places of the header, the description, the SHA-256 and the data. Control: the same maker."""
    sealed(PATH, described(), arrays())
    whole, rng = PATH.read_bytes(), np.random.default_rng(0)
    assert read()[0]["b"].asnumpy().tolist() == [[4, 5], [6, 7]]
    found = set()
    for place in rng.integers(0, len(whole), 150):
        PATH.write_bytes(whole[:place] + bytes([whole[place] ^ int(rng.integers(1, 256))]) + whole[place + 1:])
        with pytest.raises(CheckpointError) as raised:
            read()
        found.add(next(said for said in ("truncated", "SHA-256", "is not a checkpoint") if said in str(raised.value)))
    assert found >= {"truncated", "SHA-256"}


@pytest.mark.parametrize("raw", [b"", b"1234567", (2**63).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") +
                                 b"[]", (4).to_bytes(8, "little") + b"{\xff\xff}", b"\0" * 8, b"[" * 10**6])
def test_what_is_no_safetensors_file_raises(raw):
    PATH.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"c\.safetensors is truncated, damaged or not in the format safetensors"):
        read()


class Malice:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(("text", "said"), [
    ("", "JSONDecodeError"), ("[]", "TypeError"), ("{}", "KeyError: 'version'"), ("[" * 10**5, "RecursionError"),
    (pickle.dumps(Malice(), 0).decode(), "JSONDecodeError"),
    (described(complex=["d"]), "KeyError: 'd'"),
    (described(complex=["c"]), "c has 3 numbers in place of a complex one, expected 2"),
    (described(complex=["a", "a"]), "KeyError: 'complex64'"), (described(complex=7), "TypeError"), (described(), None)])
def test_a_forged_description_raises(text, said):
    """Under a right SHA-256. Nothing is executed; controls: the pickle would have been, and a right description."""
    sealed(PATH, text, arrays())
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
