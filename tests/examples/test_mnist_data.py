"""Digits: the idx format, the embedded set, and folders."""
import gzip
import hashlib
import io
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mnist_files import NAMES, idx, random_set, write

from ms_accum.examples.mnist import data
from ms_accum.examples.mnist.data import parse_idx, read_idx


@given(st.sampled_from([(), (28, 28)]), st.data())
def test_any_damage_is_refused(item_shape, draw):
    """A changed byte in the header, a truncation, or noise; however large an array the header then asks for."""
    content = bytearray(idx(np.random.default_rng(0).integers(0, 10, (3, *item_shape))))
    damage = draw.draw(st.sampled_from(["header", "truncation", "noise"]))
    if damage == "header":
        content[draw.draw(st.integers(0, 7 + 4 * len(item_shape)))] ^= draw.draw(st.integers(1, 255))
    elif damage == "truncation":
        del content[draw.draw(st.integers(0, len(content) - 1)):]
    else:
        content = draw.draw(st.binary(max_size=64))
    with pytest.raises(ValueError, match=r"^file (has the idx header|holds)"):
        parse_idx(io.BytesIO(content), item_shape, "file")


@pytest.mark.parametrize(("packed", "items"), [(False, 3), (True, 3), (False, 2**32 - 1)])
def test_a_file_is_not_read_further_than_its_header_says(tmp_path, packed, items):
    """A file of 30 MB is refused before it is in memory."""
    path = tmp_path / ("images.gz" if packed else "images")
    with gzip.open(path, "wb", compresslevel=1) if packed else path.open("wb") as file:
        file.write(struct.pack(">4I", 2051, items, 28, 28))
        for _ in range(30):
            file.write(bytes(2**20))
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"^{path} (holds|has) .*[^\n]$"):
        read_idx(path, (28, 28))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6


def test_embedded_digits_are_the_first_of_the_real_files():
    mnist = data.load("embedded")
    assert (mnist.train.images.shape, mnist.test.images.shape) == ((10_000, 28, 28), (2_000, 28, 28))
    for digits in (mnist.train, mnist.test):
        assert (digits.images.dtype, digits.labels.dtype, digits.labels.shape) == (np.uint8, np.int32, (len(digits),))
    assert mnist.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]  # well known
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
    mnist = data.load(str(tmp_path))
    got = (mnist.train.images, mnist.train.labels, mnist.test.images, mnist.test.labels)
    assert [idx(array) for array in got] == list(files.values())


IMAGES = np.zeros((7, 28, 28), np.uint8)
PACKED = gzip.compress(idx(IMAGES), mtime=0)  # part of the names of tests
HEADER = (r"train-images-idx3-ubyte has the idx header \({}\), expected 1 to 1000000 items and, beside their number, "
          r"\(2051, 28, 28\); is it")
NO_GZIP = r"train-images-idx3-ubyte\.gz is not a complete gzip file"


@pytest.mark.parametrize(("name", "content", "match"), [
    (NAMES[0], b"", HEADER.format("0, 0, 0, 0")),
    (NAMES[0], struct.pack(">4I", 2051, 1_000_001, 28, 28), HEADER.format("2051, 1000001, 28, 28")),
    (NAMES[0], idx(IMAGES)[:-1], "images-idx3-ubyte holds 5487 bytes after its header, expected 5488 for 7 items"),
    (f"{NAMES[0]}.gz", PACKED[:-20], NO_GZIP),
    (f"{NAMES[0]}.gz", b"no gzip" + PACKED, NO_GZIP),
    (f"{NAMES[0]}.gz", PACKED[:10] + b"\xff" + PACKED[11:], NO_GZIP),
    (NAMES[3], None, r"t10k-labels-idx1-ubyte \(or t10k-labels-idx1-ubyte\.gz\) is missing; expected a folder"),
    (NAMES[1], idx(np.zeros(6)), r"holds 7 images, but .*train-labels-idx1-ubyte holds 6 labels"),
    (NAMES[1], idx(np.array([3, 10, 2])), r"labels-idx1-ubyte holds the label 10, expected 0 to 9"),
])
def test_folders_that_hold_no_set_are_refused(tmp_path, name, content, match):
    write(tmp_path, random_set())
    (tmp_path / name.removesuffix(".gz")).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        data.load(str(tmp_path))
