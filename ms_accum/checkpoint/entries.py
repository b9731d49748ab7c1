"""The entries of a file in one of MindSpore's formats: found in the file first, then read one by one.

`mindspore.load_checkpoint` holds the whole file in memory, and with ".ckpt" the parsed message as well. Here the memory
is that of one entry.

A ".safetensors" file is the length of a header, the header (JSON, with the dtype, shape and place of each entry), and
the data. A ".ckpt" file is a protocol buffer, whose fields are these:

    Checkpoint:  1 value (repeated; an entry above 512 MiB is several)
    value:       1 tag, the name        2 tensor
    tensor:      1 dims (repeated)      2 dtype, as "Float32"      3 data

Source: https://github.com/huggingface/safetensors#format, https://protobuf.dev/programming-guides/encoding,
`mindspore/ccsrc/utils/checkpoint.proto`.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import BinaryIO, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor

_DTYPES = {"BOOL": ms.bool_, "U8": ms.uint8, "I8": ms.int8, "U16": ms.uint16, "I16": ms.int16, "U32": ms.uint32,
           "I32": ms.int32, "U64": ms.uint64, "I64": ms.int64, "F16": ms.float16, "BF16": ms.bfloat16,
           "F32": ms.float32, "F64": ms.float64}  # by their names in safetensors
_NAMED = {str(dtype): dtype for dtype in _DTYPES.values()}  # by their names in MindSpore


class Entry(NamedTuple):
    """Describe an entry of a file that is open.

    Attributes:
        file: The file.
        dtype, shape: Of the entry.
        parts: Places and lengths of its data, in bytes.
    """

    file: BinaryIO
    dtype: ms.Type
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]

    def read(self) -> Tensor:
        """Return the values, in memory of their own. Raise OSError if the file ends before them."""
        values: np.ndarray = np.empty(prod(self.shape), _stored(self.dtype))
        left = values.view(np.uint8)
        for place, length in self.parts:
            self.file.seek(place)
            if self.file.readinto(left[:length]) < length:  # type: ignore[attr-defined]
                raise OSError(f"{self.file.name} has become shorter while it was read")
            left = left[length:]
        if self.dtype == ms.bfloat16:  # NumPy has none: these are the upper halves of float32
            return Tensor((values.astype(np.uint32) << 16).view(np.float32).reshape(self.shape), ms.bfloat16)
        return Tensor.from_numpy(values.reshape(self.shape))


def entries_in(file: BinaryIO, suffix: str) -> dict[str, Entry]:
    """Return the entries of an open file by their names, without reading their values.

    `suffix`: ".ckpt" or ".safetensors". Raise an error, of any kind, for a file that is not in this format.
    """
    size = file.seek(0, 2)
    found = _in_ckpt(file, size) if suffix == ".ckpt" else _in_safetensors(file, size)
    for name, entry in found.items():
        length = sum(length for _, length in entry.parts)
        wanted = prod(entry.shape) * np.dtype(_stored(entry.dtype)).itemsize
        if min(entry.shape, default=0) < 0 or length != wanted:
            raise ValueError(f"{name} takes {length} bytes, expected {wanted}")
        if any(place < 0 or part < 0 or place + part > size for place, part in entry.parts):
            raise ValueError(f"{name} lies outside of the file")
    return found


def _stored(dtype: ms.Type) -> type:
    return np.uint16 if dtype == ms.bfloat16 else ms.dtype_to_nptype(dtype)


def _in_safetensors(file: BinaryIO, size: int) -> dict[str, Entry]:
    file.seek(0)
    start = 8 + int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(min(start, size) - 8))
    header.pop("__metadata__", None)
    found = {}
    for name, about in header.items():
        first, end = about["data_offsets"]
        found[name] = Entry(file, _DTYPES[about["dtype"]], tuple(about["shape"]), ((start + first, end - first),))
    return found


def _in_ckpt(file: BinaryIO, size: int) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for _, start, length in _fields(file, 0, size):
        (_, tag, letters), (_, place, end) = _fields(file, start, start + length)
        file.seek(tag)
        name = file.read(letters).decode()
        dims, part, dtype = [], (0, 0), ""
        for number, at, value in _fields(file, place, place + end):
            if number == 1:
                dims.append(value)
            elif number == 2:
                file.seek(at)
                dtype = file.read(value).decode()
            else:
                part = at, value
        parts = (*found[name].parts, part) if name in found else (part,)
        found[name] = Entry(file, _NAMED[dtype], () if dims == [0] else tuple(dims), parts)
    return found


def _fields(file: BinaryIO, place: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field of a message, the place of its bytes and their length, or its number as value."""
    while place < end:
        file.seek(place)
        number, kind = divmod(_varint(file), 8)
        value, place = _varint(file), file.tell()
        if kind not in (0, 2):
            raise ValueError(f"field {number} is of kind {kind}, expected a number or bytes")
        yield number, place, value
        place += value if kind == 2 else 0


def _varint(file: BinaryIO) -> int:
    """Read a number: 7 bits in each byte, the lowest first; the upper bit says that another byte follows."""
    value = shift = 0
    while True:
        byte = file.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
        shift += 7
