"""The entries of a file in one of MindSpore's formats: found in the file first, then read one by one.

`mindspore.load_checkpoint` holds the whole file in memory, and with ".ckpt" the parsed message as well. Here the memory
is that of one entry.

A ".safetensors" file is the length of a header, the header (JSON, with the dtype, shape and place of each entry), and
the data. A ".ckpt" file is a protocol buffer, whose fields are these:

    Checkpoint:  1 value (repeated; above 512 MiB, one for each slice of an entry)
    value:       1 tag, the name        2 tensor
    tensor:      1 dims (repeated)      2 dtype, as "Float32"      3 data

Source: https://github.com/huggingface/safetensors#format, https://protobuf.dev/programming-guides/encoding,
`mindspore/ccsrc/utils/checkpoint.proto`.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import prod
from operator import index
from typing import BinaryIO, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor

_DTYPES = {"BOOL": ms.bool_, "U8": ms.uint8, "I8": ms.int8, "U16": ms.uint16, "I16": ms.int16, "U32": ms.uint32,
           "I32": ms.int32, "U64": ms.uint64, "I64": ms.int64, "F16": ms.float16, "BF16": ms.bfloat16,
           "F32": ms.float32, "F64": ms.float64, "C64": ms.complex64}  # by their names in safetensors
Found = tuple[str, ms.Type, tuple[int, ...], tuple[tuple[int, int], ...]]  # name, and then as in `Entry`
_NAMED = {str(dtype): dtype for dtype in (*_DTYPES.values(), ms.complex128)}  # by their names in MindSpore


class Entry(NamedTuple):
    """Describe an entry of a file that is open.

    Attributes:
        file: The file.
        dtype, shape: Of the entry.
        parts: Places and lengths of its data, in bytes.
        written: When the file was last written, in nanoseconds.
    """

    file: BinaryIO
    dtype: ms.Type
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    written: int

    def read(self) -> Tensor:
        """Return the values, in memory of their own. Raise OSError if the file was written since it was found."""
        values: np.ndarray = np.empty(prod(self.shape), _stored(self.dtype))
        left = values.view(np.uint8)
        for place, length in self.parts:
            self.file.seek(place)
            if self.file.readinto(left[:length]) < length:  # type: ignore[attr-defined]
                raise OSError(f"{self.file.name} has become shorter while it was read; load another file")
            left = left[length:]
        if written_at(self.file) != self.written:
            raise OSError(f"{self.file.name} was written while it was read; load another file")
        if self.dtype == ms.bfloat16:  # NumPy has none: these are the upper halves of float32
            return Tensor((values.astype(np.uint32) << 16).view(np.float32).reshape(self.shape), ms.bfloat16)
        return Tensor.from_numpy(values.reshape(self.shape))


def entries_in(file: BinaryIO, suffix: str) -> dict[str, Entry]:
    """Return the entries of an open file by their names, without reading their values.

    `suffix`: ".ckpt" or ".safetensors". Raise an error, of any kind, for a file that is not in this format.
    """
    size, written = file.seek(0, 2), written_at(file)
    found: dict[str, Entry] = {}
    for name, dtype, shape, parts in (_in_ckpt if suffix == ".ckpt" else _in_safetensors)(file, size):
        length, wanted = sum(length for _, length in parts), prod(shape) * _stored(dtype).itemsize
        if min(shape, default=0) < 0 or length != wanted:
            raise ValueError(f"{name} takes {length} bytes, expected {wanted}")
        if name in found:
            raise ValueError(f"two entries are called {name}")
        found[name] = Entry(file, dtype, shape, parts, written)
    return found


def written_at(file: BinaryIO) -> int:
    """Return when an open file was last written, in nanoseconds."""
    return os.fstat(file.fileno()).st_mtime_ns


def _stored(dtype: ms.Type) -> np.dtype:
    return np.dtype("uint16" if dtype == ms.bfloat16 else str(dtype).lower())


def _in_safetensors(file: BinaryIO, size: int) -> Iterator[Found]:
    file.seek(0)
    start = 8 + int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(min(start, size) - 8))
    header.pop("__metadata__", None)
    place = 0
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, end = map(index, about["data_offsets"])
        if first != place:
            raise ValueError(f"{name} begins at {first}, expected {place}, where the entry before it ends")
        place = end
        yield name, _DTYPES[about["dtype"]], tuple(map(index, about["shape"])), ((start + first, end - first),)
    if start + place != size:
        raise ValueError(f"the file has {size} bytes, expected {start + place}")


def _in_ckpt(file: BinaryIO, size: int) -> Iterator[Found]:
    slices: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for _, start, length in _fields(file, 0, size):
        (_, *tag), (_, place, length) = _fields(file, start, start + length)
        *dims, (_, *kind), (_, *data) = _fields(file, place, place + length)
        shape = tuple(value for _, _, value in dims)
        described = _text(file, *tag), _text(file, *kind), () if shape == (0,) else shape  # (0,) means a scalar
        slices.setdefault(described, []).append((data[0], data[1]))
    for (name, dtype, shape), parts in slices.items():
        yield name, _NAMED[dtype], shape, tuple(parts)


def _text(file: BinaryIO, place: int, length: int) -> str:
    file.seek(place)
    return file.read(length).decode()


def _fields(file: BinaryIO, place: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, place and length of each field of a message; for an integer, its value in place of the length."""
    while place < end:
        file.seek(place)
        number, kind = divmod(_varint(file), 8)
        value, place = _varint(file), file.tell()
        if kind not in (0, 2):
            raise ValueError(f"field {number} is of kind {kind}, expected a number or bytes")
        yield number, place, value
        place += value if kind == 2 else 0
    if place > end:
        raise ValueError("a field is longer than its message")


def _varint(file: BinaryIO) -> int:
    """Read a number: 7 bits in each byte, the lowest first; the upper bit says that another byte follows."""
    value = 0
    for shift in range(0, 64, 7):
        byte = file.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("a number has more than 64 bits")
