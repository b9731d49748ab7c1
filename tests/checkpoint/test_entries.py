"""Entries of a file, read one by one: held against `mindspore.load_checkpoint`."""
import json
import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from mindspore.train import serialization

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
def test_a_file_that_is_cut_raises(suffix):
    """Wherever it is cut, by finding the entries or by reading them."""
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


def test_entries_outside_of_the_file_or_of_another_length_are_refused():
    for first, end, message in ((0, 8, "a takes 8 bytes, expected 4"), (4, 8, "a lies outside of the file")):
        header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [first, end]}}).encode()
        with open("c.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header + b"1234")
        with pytest.raises(ValueError, match=message):
            read("c.safetensors")


def test_a_file_that_becomes_shorter_raises():
    saved("c.safetensors")
    with open("c.safetensors", "rb") as file:
        entries = entries_in(file, ".safetensors")
        os.truncate("c.safetensors", 10)
        with pytest.raises(OSError, match=r"c\.safetensors has become shorter while it was read"):
            max(entries.values(), key=lambda entry: entry.parts[0]).read()
