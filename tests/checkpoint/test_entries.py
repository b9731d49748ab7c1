"""Entries of a file, read one by one: held against `mindspore.load_checkpoint`."""
import json
import os
import time
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from mindspore.train import serialization
from mindspore.train.checkpoint_pb2 import Checkpoint, MapTensorProto, TensorProto

from ms_accum.checkpoint.entries import entries_in

DTYPES = (ms.bool_, ms.uint8, ms.int8, ms.uint16, ms.int16, ms.uint32, ms.int32, ms.uint64, ms.int64, ms.float16,
          ms.bfloat16, ms.float32, ms.float64)
SHAPES = (), (1,), (7,), (3, 5), (2, 3, 400)
SUFFIXES = [".ckpt", ".safetensors"]


def bits(tensor):
    """Dtype, shape and bits; those of bfloat16 as float32, which holds its values."""
    values = (tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor).asnumpy()
    return tensor.dtype, tuple(tensor.shape), values.tobytes()


def saved(path):
    """Save a Parameter of each dtype and shape at `path`, by MindSpore."""
    rng = np.random.default_rng(0)
    kept = {f"{dtype}.{shape}": Parameter(Tensor(rng.normal(size=shape) * 40, ms.float32).abs().astype(dtype))
            for dtype in DTYPES for shape in SHAPES}
    ms.save_checkpoint([{"name": name, "data": p} for name, p in kept.items()], path, format=path.split(".")[-1])
    return kept


def read(path):
    """Read all entries of a file."""
    with open(path, "rb") as file:
        return {name: entry.read() for name, entry in entries_in(file, f".{path.split('.')[-1]}").items()}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kilobytes", [512 * 1024, 1])
def test_entries_are_what_mindspore_loads(suffix, kilobytes, monkeypatch):
    """Also where MindSpore writes slices of an entry (".ckpt", above 512 MiB; here above 1 KiB)."""
    monkeypatch.setattr(serialization, "SLICE_SIZE", kilobytes)
    kept, path = saved(f"c{suffix}"), f"c{suffix}"
    found = {name: bits(tensor) for name, tensor in read(path).items()}
    assert found == {name: bits(p) for name, p in kept.items()}
    assert found == {name: bits(p) for name, p in ms.load_checkpoint(path, format=suffix[1:]).items()}
    if suffix == ".ckpt":  # control: slices were written
        with open(path, "rb") as file:
            parts = max(len(entry.parts) for entry in entries_in(file, suffix).values())
        assert (parts > 1) == (kilobytes == 1)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_is_cut_is_never_read_as_complete(suffix):
    """Wherever it is cut, it raises an error or has fewer entries."""
    saved(f"c{suffix}")
    with open(f"c{suffix}", "rb") as file:
        whole = file.read()
    count, missed = len(read(f"c{suffix}")), 0
    for end in range(0, len(whole), 997):
        with open(f"d{suffix}", "wb") as file:
            file.write(whole[:end])
        try:
            missed += len(read(f"d{suffix}")) == count
        except (ValueError, IndexError, KeyError, TypeError):
            continue
    assert missed == 0


def of_safetensors(*entries, data=b"12345678"):
    """A file with these entries: (dtype, shape, data_offsets)."""
    header = {f"e{i}": dict(zip(("dtype", "shape", "data_offsets"), entry)) for i, entry in enumerate(entries)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def of_ckpt(*entries):
    """A file with these entries: (name, dims, dtype, data)."""
    tensors = [TensorProto(dims=dims, tensor_type=dtype, tensor_content=data) for _, dims, dtype, data in entries]
    return b"".join(Checkpoint(value=[Checkpoint.Value(tag=name, tensor=tensor)]).SerializeToString()
                    for (name, *_), tensor in zip(entries, tensors))


FORGED = {  # contents, and what the error says
    "beyond the file": (".safetensors", of_safetensors(("F32", [3], [0, 12])), "has .* bytes, expected"),
    "another length": (".safetensors", of_safetensors(("F32", [1], [0, 8])), "e0 takes 8 bytes, expected 4"),
    "a hole": (".safetensors", of_safetensors(("F32", [1], [4, 8])), "begins at 4, expected 0"),
    "overlapping": (".safetensors", of_safetensors(("F32", [2], [0, 8]), ("F32", [1], [4, 8])), "at 4, expected 8"),
    "in the header": (".safetensors", of_safetensors(("F32", [3], [-4, 8])), "begins at -4, expected 0"),
    "backwards": (".safetensors", of_safetensors(("F32", [2], [0, 8]), ("F32", [0], [8, 0])), "e1 takes -8 bytes"),
    "negative axes": (".safetensors", of_safetensors(("F32", [-1, -2], [0, 8])), "e0 takes 8 bytes, expected 8"),
    "bytes left": (".safetensors", of_safetensors(("F32", [1], [0, 4])), "has .* bytes, expected"),
    "float places": (".safetensors", of_safetensors(("F32", [2], [0.0, 8.0])), "float"),
    "float axes": (".safetensors", of_safetensors(("F32", [2.0], [0, 8])), "float"),
    "a long header": (".safetensors", (2**63).to_bytes(8, "little") + b"{}", None),
    "an unknown dtype": (".safetensors", of_safetensors(("F7", [2], [0, 8])), "F7"),
    "too few bytes": (".ckpt", of_ckpt(("a", [2], "Float32", b"1234")), "a takes 4 bytes, expected 8"),
    "a negative axis": (".ckpt", of_ckpt(("a", [-1], "Float32", b"1234")), "a takes 4 bytes, expected"),
    "no such dtype": (".ckpt", of_ckpt(("a", [1], "Float7", b"1234")), "Float7"),
    "two of a name": (".ckpt", of_ckpt(("a", [1], "Float32", b"1234"), ("a", [2], "Float16", b"1234")), "called a"),
    "a field without end": (".ckpt", b"\x0a\x7f", "longer than its message|too many|not enough|index"),
    "a field of another kind": (".ckpt", b"\x09" + b"\0" * 8, "field 1 is of kind 1"),
    "a number without end": (".ckpt", b"\xff" * 2**21, "more than 64 bits"),
    "a nested tensor": (".ckpt", Checkpoint(value=[Checkpoint.Value(tag="a", maptensor=MapTensorProto(
        tensor=[TensorProto(tensor_type="Float32", tensor_content=b"1234")]))]).SerializeToString(), None),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_file_raises_before_a_value_is_read(case):
    """Controls: the same makers with right contents."""
    suffix, contents, said = FORGED[case]
    Path(f"c{suffix}").write_bytes(contents)
    with open(f"c{suffix}", "rb") as file:
        # Any error: `read_file` makes a CheckpointError of it.
        with pytest.raises((ValueError, KeyError, TypeError, IndexError, OverflowError), match=said):
            entries_in(file, suffix)


def test_a_right_file_of_the_same_makers_is_read():
    Path("c.safetensors").write_bytes(of_safetensors(("F32", [1], [4, 8]), ("I32", [], [0, 4])))
    slices = ("b", [2], "Int8", b"1"), ("b", [2], "Int8", b"2")
    Path("c.ckpt").write_bytes(of_ckpt(("a", [0], "Float32", b"1234"), *slices))
    number, = np.frombuffer(b"5678", np.float32)
    assert read("c.safetensors")["e0"].asnumpy().tolist() == [number]
    assert read("c.ckpt")["b"].asnumpy().tolist() == [49, 50]
    assert read("c.ckpt")["a"].shape == ()


def test_a_file_that_is_written_in_place_while_it_is_read_raises():
    saved("c.safetensors")
    with open("c.safetensors", "rb") as file:
        first, second, *_ = entries_in(file, ".safetensors").values()
        first.read()
        time.sleep(0.02)  # the clock of the file system
        with open("c.safetensors", "r+b") as other:
            other.write(b"1")
        with pytest.raises(OSError, match=r"c\.safetensors was written while it was read; load another file"):
            second.read()


def test_a_file_that_becomes_shorter_raises():
    saved("c.safetensors")
    with open("c.safetensors", "rb") as file:
        entries = entries_in(file, ".safetensors")
        os.truncate("c.safetensors", 10)
        with pytest.raises(OSError, match=r"c\.safetensors has become shorter while it was read"):
            max(entries.values(), key=lambda entry: entry.parts[0]).read()
