"""Digits: the idx format, the embedded set, folders, and the fetch of the complete set from mirrors."""
import contextlib
import gzip
import hashlib
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mnist_files import NAMES, idx, random_set, write

from ms_accum.mnist import data, fetch
from ms_accum.mnist.fetch import FetchError, Known
from ms_accum.mnist.idx import parse, read_images, read_labels

IMAGES = np.arange(3 * 784).reshape(3, 28, 28) % 256


# --- idx ------------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=40))
def test_labels_come_back_as_written(content):
    array = np.frombuffer(content, np.uint8)
    assert (parse(io.BytesIO(idx(array)), (), "file") == array).all()


@given(st.integers(1, 4), st.integers(0, 2 ** 32 - 1))
def test_images_come_back_as_written(count, seed):
    array = np.random.default_rng(seed).integers(0, 256, (count, 28, 28)).astype(np.uint8)
    got = parse(io.BytesIO(idx(array)), (28, 28), "file")
    assert got.dtype == np.uint8
    assert (got == array).all()


@pytest.mark.parametrize(("content", "match"), [
    (b"", "file holds 0 bytes, but an idx3 header has 16"),
    (idx(IMAGES)[:15], "file holds 15 bytes, but an idx3 header has 16"),
    (idx(np.zeros(20)), "file starts with the magic number 2049, expected 2051"),
    (idx(IMAGES.reshape(3, 14, 56)), r"file holds items of shape \(14, 56\), expected \(28, 28\)"),
    (struct.pack(">4I", 2051, 0, 28, 28), "file holds no digits"),
    (struct.pack(">4I", 2051, 1_000_001, 28, 28), "file says that it holds 1000001 items, expected at most 1000000; is it a file of MNIST"),
    (idx(IMAGES)[:-1], "file holds 2351 bytes behind its header, expected 2352 for 3 items"),
    (idx(IMAGES) + b"\0", "file holds more than 2352 bytes behind its header, expected 2352 for 3 items"),
])
def test_what_is_no_idx_file_is_refused(content, match):
    with pytest.raises(ValueError, match=match):
        parse(io.BytesIO(content), (28, 28), "file")


def test_every_truncation_is_refused():
    content = idx(IMAGES[:1])
    for length in range(0, len(content), 7):
        with pytest.raises(ValueError, match="bytes"):
            parse(io.BytesIO(content[:length]), (28, 28), "file")


IDX = {item_shape: idx(np.random.default_rng(0).integers(0, 10, (3, *item_shape))) for item_shape in ((), (28, 28))}


@given(st.sampled_from(sorted(IDX)), st.integers(0, 19), st.integers(1, 255))
def test_a_wrong_byte_in_the_header_is_refused(item_shape, place, change):
    """Magic, sizes: whichever byte is another one, however large an array it asks for."""
    content = bytearray(IDX[item_shape])
    content[place % (8 + 4 * len(item_shape))] ^= change
    with pytest.raises(ValueError, match=r"^file (starts with the magic|holds|says that it holds)"):
        parse(io.BytesIO(content), item_shape, "file")


@given(st.sampled_from(sorted(IDX)), st.binary(max_size=64))
def test_noise_is_refused(item_shape, noise):
    with pytest.raises(ValueError, match=r"^file (starts with the magic|holds|says that it holds)"):
        parse(io.BytesIO(noise), item_shape, "file")


def test_a_label_that_is_no_digit_is_refused(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(idx(np.array([3, 10, 2])))
    with pytest.raises(ValueError, match="labels holds the label 10, expected 0 to 9"):
        read_labels(path)


@pytest.mark.parametrize("damage", [
    lambda packed: packed[:-20],
    lambda packed: b"no gzip" + packed,
    lambda packed: packed[:-8] + bytes(4) + packed[-4:],
    lambda packed: packed[:10] + b"\xff" + packed[11:],
], ids=["truncated", "garbage", "wrong checksum", "no deflate"])
def test_a_damaged_gzip_file_is_refused(tmp_path, damage):
    path = tmp_path / "images.gz"
    path.write_bytes(damage(gzip.compress(idx(np.random.default_rng(0).integers(0, 256, (3, 28, 28))))))
    with pytest.raises(ValueError, match=r"images\.gz is no complete gzip file"):
        read_images(path)


@pytest.mark.parametrize("items", [3, 120_000, 2 ** 32 - 1])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_not_read_further_than_its_header_says(tmp_path, packed, items):
    """One of 100 MB, packed in 0.5 MB or with a hole in it; refused before it is in memory, whatever the header says."""
    path = tmp_path / ("images.gz" if packed else "images")
    header, length = struct.pack(">4I", 2051, items, 28, 28), 100 * 2 ** 20
    with gzip.open(path, "wb", compresslevel=1) if packed else path.open("wb") as file:
        file.write(header)
        if packed:
            for _ in range(length // 2 ** 20):
                file.write(bytes(2 ** 20))
        else:
            file.truncate(length)
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"^{path} (holds|says)") as raised:
        read_images(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(raised.value)
    assert peak < (4e6 if items != 120_000 else 1.1 * length)


# --- embedded -------------------------------------------------------------------------------------------------------


def test_embedded_digits():
    mnist = data.load("embedded")
    assert mnist.train.images.shape == (10_000, 28, 28)
    assert mnist.test.images.shape == (2_000, 28, 28)
    for digits in (mnist.train, mnist.test):
        assert digits.images.dtype == np.uint8
        assert digits.labels.dtype == np.int32
        assert digits.labels.shape == (len(digits),)
        assert np.bincount(digits.labels, minlength=10).min() > len(digits) // 13
    # As everyone who ever printed MNIST knows them.
    assert mnist.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]


def test_embedded_files_are_small_and_licensed():
    files = sorted(data.EMBEDDED.rglob("*.gz"))
    assert [f"{path.parent.name}/{path.stem}" for path in files] == sorted(NAMES)
    assert sum(path.stat().st_size for path in files) <= 2_000_000
    readme = (data.EMBEDDED / "README.md").read_text(encoding="utf-8")
    for word in ("LeCun", "Cortes", "Burges", "CC BY-SA 3.0", "10,000", "2,000"):
        assert word in readme


def test_embedded_digits_are_the_first_of_the_real_files():
    # md5 of the real files, cut after 10,000 and 2,000 items and with that count in the header.
    expected = {
        "train/train-images-idx3-ubyte": "63a563d3843dba5073e604e3a7990e87",
        "train/train-labels-idx1-ubyte": "e6ef65212ddc6f9010e22d95b5269050",
        "test/t10k-images-idx3-ubyte": "014beca301477cb2e974ccd9bba2262c",
        "test/t10k-labels-idx1-ubyte": "a82723c4f1ffcf0f0a0d4d06f6c879a0",
    }
    for name, md5 in expected.items():
        assert hashlib.md5(gzip.decompress((data.EMBEDDED / f"{name}.gz").read_bytes())).hexdigest() == md5


def test_embedded_digits_are_the_first_of_the_full_set():
    folder = os.environ.get("MS_ACCUM_MNIST_DIR")
    if not folder:
        pytest.skip("MS_ACCUM_MNIST_DIR names no folder with the complete MNIST")
    full, embedded = data.load(folder), data.load("embedded")
    assert fetch.is_complete(Path(folder)) or fetch.is_complete(Path(folder) / "MNIST_Data")
    for few, all_ in ((embedded.train, full.train), (embedded.test, full.test)):
        assert (few.images == all_.images[:len(few)]).all()
        assert (few.labels == all_.labels[:len(few)]).all()


# --- folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("nested", ["", "MNIST_Data"])
def test_a_folder_in_the_layout_of_the_tutorial(tmp_path, packed, nested):
    files = random_set(train=7, test=3)
    write(tmp_path / nested, files, packed)
    mnist = data.load(str(tmp_path))
    got = (mnist.train.images, mnist.train.labels, mnist.test.images, mnist.test.labels)
    for array, content in zip(got, files.values(), strict=True):
        assert idx(array) == content


def test_a_missing_file_is_named(tmp_path):
    write(tmp_path, random_set())
    (tmp_path / "test" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte \(or t10k-labels-idx1-ubyte\.gz\) is missing; expected a folder"):
        data.load(str(tmp_path))


def test_images_and_labels_must_be_equal_in_number(tmp_path):
    files = random_set()
    files["train/train-labels-idx1-ubyte"] = idx(np.zeros(6))
    with pytest.raises(ValueError, match=r"holds 7 images, but .*train-labels-idx1-ubyte holds 6 labels"):
        data.load(str(write(tmp_path, files)))


# --- fetch ----------------------------------------------------------------------------------------------------------


def known(files):
    return {name: Known(len(content), hashlib.md5(content).hexdigest()) for name, content in files.items()}


def zipped(files, prefix="MNIST_Data/"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(prefix + name, content)
    return buffer.getvalue()


def gzipped(files, folder):
    return {f"/{folder}/{name.rpartition('/')[2]}.gz": gzip.compress(content) for name, content in files.items()}


class Server:
    """Answers on 127.0.0.1: `pages` maps a path to bytes, `cut` shortens what is sent below what was announced."""

    def __init__(self):
        self.pages, self.cut, self.pause, self.asked = {}, 0, 0, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.path)
                page = outer.pages.get(self.path)
                self.send_response(404 if page is None else 200)
                self.send_header("Content-Length", str(len(page or b"")))
                self.end_headers()
                sent = (page or b"")[:len(page or b"") - outer.cut]
                rate = 16_384 if outer.pause else len(sent) + 1
                with contextlib.suppress(ConnectionError):  # `download` leaves its first two requests when it has read the head
                    for start in range(0, len(sent), rate):
                        self.wfile.write(sent[start:start + rate])
                        time.sleep(outer.pause)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def files():
    return random_set()


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "mnist"


def held(folder):
    """{name: bytes} of every file below a folder, and of everything beside it that should not be there."""
    return {str(path.relative_to(folder.parent)): path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()}


def complete(files):
    return {f"mnist/{name}": content for name, content in files.items()}


@pytest.mark.parametrize("prefix", ["MNIST_Data/", ""])
def test_an_archive_is_fetched(server, files, cache, prefix, capsys):
    server.pages["/MNIST_Data.zip"] = zipped(files, prefix)
    assert fetch.full_set(cache, [f"{server.url}/MNIST_Data.zip"], known(files)) == cache
    assert held(cache) == complete(files)
    assert idx(data.load_folder(cache).train.labels) == files["train/train-labels-idx1-ubyte"]
    assert capsys.readouterr().out == ""


def test_packed_files_are_fetched(server, files, cache):
    server.pages.update(gzipped(files, "mnist"))
    fetch.full_set(cache, [f"{server.url}/mnist/"], known(files))
    assert held(cache) == complete(files)


def test_a_complete_cache_needs_no_network(files, cache):
    write(cache, files)
    assert fetch.full_set(cache, [], known(files)) == cache


def test_a_damaged_cache_is_fetched_again(server, files, cache):
    write(cache, {**files, NAMES[0]: files[NAMES[0]][:-1] + b"\0"})
    assert not fetch.is_complete(cache, known(files))
    server.pages["/set.zip"] = zipped(files)
    fetch.full_set(cache, [f"{server.url}/set.zip"], known(files))
    assert held(cache) == complete(files)


def changed(files):
    name = NAMES[2]
    return {**files, name: files[name][:-1] + bytes([files[name][-1] ^ 1])}


def bad_answers(files):
    without = {name: content for name, content in files.items() if name != NAMES[3]}
    longer = {**files, NAMES[1]: files[NAMES[1]] + b"\0"}
    packed = gzipped(files, "bad")
    return {
        "404": ({}, "bad.zip", "404"),
        "garbage zip": ({"/bad.zip": b"<html>Sign in</html>"}, "bad.zip", "not a zip file"),
        "wrong md5": ({"/bad.zip": zipped(changed(files))}, "bad.zip", "t10k-images-idx3-ubyte has 2368 bytes and md5"),
        "too long": ({"/bad.zip": zipped(longer)}, "bad.zip", "train-labels-idx1-ubyte has more than 15 bytes"),
        "missing member": ({"/bad.zip": zipped(without)}, "bad.zip", "t10k-labels-idx1-ubyte"),
        "garbage gz": ({**packed, "/bad/train-images-idx3-ubyte.gz": b"garbage"}, "bad/", "Not a gzipped file"),
        "truncated gz": ({key: page[:-30] for key, page in packed.items()}, "bad/", "ended before"),
        "one file missing": ({key: page for key, page in packed.items() if "labels" not in key}, "bad/", "404"),
        "wrong md5 in gz": (gzipped(changed(files), "bad"), "bad/", "t10k-images-idx3-ubyte has 2368 bytes and md5"),
    }


@pytest.mark.parametrize("kind", list(bad_answers(random_set())))
def test_a_bad_mirror_is_passed_over(server, files, cache, kind):
    pages, address, answer = bad_answers(files)[kind]
    server.pages.update(pages)
    with pytest.raises(FetchError, match=rf"127\.0\.0\.1:\d+: .*{answer}") as raised:
        fetch.full_set(cache, [f"{server.url}/{address}"], known(files))
    assert "\n" not in str(raised.value)
    assert held(cache) == {}

    server.pages["/good.zip"] = zipped(files)
    fetch.full_set(cache, [f"{server.url}/{address}", f"{server.url}/good.zip"], known(files))
    assert held(cache) == complete(files)


def test_an_answer_that_breaks_off_is_refused(server, files, cache):
    server.pages["/set.zip"] = zipped(files)
    server.cut = 10
    with pytest.raises(FetchError, match="File size is"):
        fetch.full_set(cache, [f"{server.url}/set.zip"], known(files))
    assert held(cache) == {}


def test_an_archive_has_no_say_in_where_it_writes(server, files, cache, tmp_path):
    evil = {**{f"MNIST_Data/{name}": content for name, content in files.items()},
            "../../evil": b"x", "/evil": b"x", "MNIST_Data/train/../../../evil": b"x"}
    server.pages["/set.zip"] = zipped(evil, prefix="")
    fetch.full_set(cache, [f"{server.url}/set.zip"], known(files))
    assert held(cache) == complete(files)
    assert not list(tmp_path.rglob("*evil*"))


def test_a_bomb_is_not_unpacked(server, files, cache, monkeypatch):
    asked = []
    read = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: asked.append(size) or read(self, size))
    server.pages.update(gzipped({**files, NAMES[0]: bytes(10 ** 7)}, "bad"))
    with pytest.raises(FetchError, match=f"has more than {len(files[NAMES[0]])} bytes"):
        fetch.full_set(cache, [f"{server.url}/bad/"], known(files))
    assert asked == [len(files[NAMES[0]]) + 1]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_fetch_leaves_nothing(files, cache, monkeypatch, stop):
    def download(url, path, most_bytes):
        path.write_bytes(b"half")
        raise stop

    monkeypatch.setattr(fetch, "_download", download)
    with pytest.raises(stop):
        fetch.full_set(cache, ["http://127.0.0.1/set.zip"], known(files))
    assert held(cache) == {}
    assert list(cache.parent.iterdir()) == []


def test_nothing_is_published_before_everything_is_checked(files, cache, monkeypatch):
    def download(url, path, most_bytes):
        assert held(cache).keys() <= {str(path.relative_to(cache.parent))}
        path.write_bytes(zipped(files))

    monkeypatch.setattr(fetch, "_download", download)
    fetch.full_set(cache, ["http://127.0.0.1/set.zip"], known(files))
    assert held(cache) == complete(files)


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_without_network_the_alternatives_are_named(files, cache):
    mirrors = [f"http://127.0.0.1:{closed_port()}/set.zip", f"http://127.0.0.1:{closed_port()}/mnist/"]
    with pytest.raises(FetchError, match=r"could not fetch MNIST .*refused.*; 127.*refused.*use --data embedded.*--data DIR") as raised:
        fetch.full_set(cache, mirrors, known(files))
    assert "\n" not in str(raised.value)


def test_a_silent_mirror_is_left(files, cache, monkeypatch):
    monkeypatch.setattr(fetch, "CONNECT_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.perf_counter()
        with pytest.raises(FetchError, match="timed out"):
            fetch.full_set(cache, [f"http://127.0.0.1:{silent.getsockname()[1]}/set.zip"], known(files))
    assert time.perf_counter() - start < 5


def test_a_mirror_that_falls_silent_is_left(server, files, cache, monkeypatch):
    # The package `download` asks three times; only the third answer, the file itself, has no timeout of its own there.
    monkeypatch.setattr(fetch, "CONNECT_SECONDS", 0.3)
    server.pages["/set.zip"] = zipped(files)
    write_response = BaseHTTPRequestHandler.end_headers

    def stall(handler):
        write_response(handler)
        if len(server.asked) == 3:
            time.sleep(1.5)

    monkeypatch.setattr(BaseHTTPRequestHandler, "end_headers", stall)
    with pytest.raises(FetchError, match="timed out"):
        fetch.full_set(cache, [f"{server.url}/set.zip"], known(files))


def test_after_mirrors_that_cut_stall_or_send_garbage_the_next_one_is_asked(server, files, cache, monkeypatch):
    """And not a byte of what they sent is kept."""
    monkeypatch.setattr(fetch, "CONNECT_SECONDS", 0.3)
    good = zipped(files)
    server.pages.update({"/cut.zip": good, "/stall.zip": good, "/garbage.zip": bytes(range(256)) * 40, "/half.zip": good[:len(good) // 2],
                         "/good.zip": good})
    write_response = BaseHTTPRequestHandler.end_headers

    def misbehave(handler):
        write_response(handler)
        server.cut = 50 if handler.path == "/cut.zip" else 0
        if handler.path == "/stall.zip" and server.asked.count("/stall.zip") == 3:
            time.sleep(1.5)

    monkeypatch.setattr(BaseHTTPRequestHandler, "end_headers", misbehave)
    names = ["cut", "stall", "garbage", "half", "404"]
    with pytest.raises(FetchError, match=r"File size is .*timed out.*not a zip file.*not a zip file.*404") as raised:
        fetch.full_set(cache, [f"{server.url}/{name}.zip" for name in names], known(files))
    assert str(raised.value).count("127.0.0.1:") == len(names)
    assert held(cache) == {}
    server.asked.clear()
    fetch.full_set(cache, [f"{server.url}/{name}.zip" for name in [*names, "good"]], known(files))
    assert held(cache) == complete(files)
    assert list(dict.fromkeys(server.asked)) == [f"/{name}.zip" for name in [*names, "good"]]


class Hose(BaseHTTPRequestHandler):
    """Sends `drop` every `pause` seconds until the other one leaves."""

    head, drop, pause = b"HTTP/1.0 200 OK\r\n\r\n", bytes(2 ** 16), 0

    def do_GET(self):
        self.wfile.write(self.head)
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(self.drop)
                time.sleep(self.pause)

    def log_message(self, *_):
        pass


ENDLESS = {
    "endless": ({}, r"sends more than the \d+ bytes that it may have"),
    "more than announced": ({"head": b"HTTP/1.0 200 OK\r\nContent-Length: 99999999999\r\n\r\n"}, r"sends more than the \d+ bytes"),
    "trickle": ({"drop": b"x", "pause": 0.05}, r"has sent \d+ bytes in \d s, which is too slow"),
    "trickling head": ({"head": b"HTTP/1.0 200 OK\r\nX: ", "drop": b"x", "pause": 0.05}, "has sent 0 bytes in 1 s, which is too slow"),
}


@pytest.mark.parametrize("kind", list(ENDLESS))
@pytest.mark.parametrize("address", ["bad.zip", "bad/"])
def test_a_mirror_that_never_ends_is_left(server, files, cache, monkeypatch, kind, address):
    """However much or little it sends: the next one is asked, and no process goes on receiving."""
    monkeypatch.setattr(fetch, "PATIENCE_SECONDS", 0.7)
    behaviour, answer = ENDLESS[kind]
    hose = ThreadingHTTPServer(("127.0.0.1", 0), type("Bad", (Hose,), behaviour))
    threading.Thread(target=hose.serve_forever, args=(0.01,), daemon=True).start()
    sizes = []
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: sizes.append(stat(path, **options).st_size) or stat(path, **options))
    mirror = f"http://127.0.0.1:{hose.server_port}/{address}"
    try:
        start = time.perf_counter()
        with pytest.raises(FetchError, match=rf"127\.0\.0\.1:\d+: {answer}") as raised:
            fetch.full_set(cache, [mirror], known(files))
        assert time.perf_counter() - start < 5
        assert "\n" not in str(raised.value)
        assert max(sizes, default=0) <= sum(map(len, files.values())) + 4 * fetch.PACKING_BYTES + 1
        assert held(cache) == {}

        server.pages["/good.zip"] = zipped(files)
        fetch.full_set(cache, [mirror, f"{server.url}/good.zip"], known(files))
        assert held(cache) == complete(files)
    finally:
        hose.shutdown()
        hose.server_close()
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    assert not [pid for pid in children if b"transfer.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_slow_mirror_is_awaited(server, cache, monkeypatch):
    """What counts is the rate, not the time: this one takes longer than the patience that one without a byte meets."""
    monkeypatch.setattr(fetch, "PATIENCE_SECONDS", 1.0)
    files = random_set(train=400)
    server.pages["/slow.zip"], server.pause = zipped(files), 0.1
    start = time.perf_counter()
    fetch.full_set(cache, [f"{server.url}/slow.zip"], known(files))
    assert time.perf_counter() - start > 1.5
    assert held(cache) == complete(files)


def test_a_download_ends_by_itself_when_nobody_waits_for_it(tmp_path, server):
    """The process of one that was killed would otherwise go on receiving."""
    hose = ThreadingHTTPServer(("127.0.0.1", 0), type("Bad", (Hose,), {"drop": b"x", "pause": 0.05}))
    threading.Thread(target=hose.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{hose.server_port}/set.zip"
    script = Path(fetch.__file__).with_name("transfer.py")
    command = [sys.executable, "-I", script, url, tmp_path / "set.zip", "10", "1000", "1", "0", *sys.path]
    ended = subprocess.run(command, timeout=10, check=False)
    hose.shutdown()
    hose.server_close()
    assert ended.returncode == -signal.SIGALRM


@pytest.mark.parametrize("change", [
    lambda data: data[:-30],
    lambda data: data[100:],
    lambda data: data.replace(b"PK\x01\x02", b"PK\x09\x09"),
    lambda data: data.replace(b"\x08\x00", b"\x63\x00"),
    lambda data: data[:200] + bytes(100) + data[300:],
    lambda data: bytes(len(data)),
], ids=["no end", "no start", "no directory", "method 99", "a hole", "zeros"])
def test_a_damaged_archive_is_refused(server, files, cache, change):
    server.pages["/bad.zip"] = change(zipped(files))
    with pytest.raises(FetchError, match=r"could not fetch MNIST \(127\.0\.0\.1:\d+: .+\); use --data embedded") as raised:
        fetch.full_set(cache, [f"{server.url}/bad.zip"], known(files))
    assert "\n" not in str(raised.value)
    assert held(cache) == {}


def test_a_cache_that_cannot_be_written_is_named(files, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"cannot write to the cache .*file.*set XDG_CACHE_HOME"):
        fetch.full_set(tmp_path / "file" / "mnist", [], known(files))


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_folder() == tmp_path / "xdg" / "ms_accum" / "mnist"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert fetch.cache_folder() == tmp_path / "home" / ".cache" / "ms_accum" / "mnist"


def test_full_is_fetched_into_the_cache_from_the_mirrors(server, files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "MIRRORS", [f"{server.url}/set.zip"])
    server.pages["/set.zip"] = zipped(files)
    # The real md5s are in force: the set of random digits is refused.
    with pytest.raises(FetchError, match="train-images-idx3-ubyte has 5504 bytes and md5"):
        data.load("full")
    assert held(tmp_path / "ms_accum" / "mnist") == {}


def test_the_mirrors_begin_with_that_of_the_tutorial():
    assert fetch.MIRRORS[0] == (
        "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/MNIST_Data.zip")
    assert len(fetch.MIRRORS) >= 3
    assert all(mirror.startswith("https://") and mirror.endswith((".zip", "/")) for mirror in fetch.MIRRORS)
