"""The download of the complete MNIST: mirrors on 127.0.0.1 that answer well, badly, slowly or not at all."""
import contextlib
import gzip
import hashlib
import io
import socket
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.mnist_files import NAMES, random_set, write

from ms_accum.examples.mnist import data, fetch

FILES = random_set()
WRONG = {**FILES, NAMES[2]: FILES[NAMES[2]][:-1] + bytes([FILES[NAMES[2]][-1] ^ 1])}


def zipped(files, prefix="MNIST_Data/"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(prefix + name, content)
    return buffer.getvalue()


def gzipped(files, folder):
    return {f"/{folder}/{name.rpartition('/')[2]}.gz": gzip.compress(content) for name, content in files.items()}


PAGES = {
    # An archive cannot choose where it writes.
    "/good.zip": zipped({f"MNIST_Data/{name}": content for name, content in FILES.items()} | dict.fromkeys(
        ["../../evil", "/evil", "MNIST_Data/train/../../../evil"], b"x"), prefix=""),
    **gzipped(FILES, "good"), "/garbage.zip": b"<html>Sign in</html>", "/changed.zip": zipped(WRONG),
    "/without.zip": zipped({name: FILES[name] for name in NAMES[:3]}),
    "/cut.zip": zipped(FILES), "/silent.zip": zipped(FILES),
    **gzipped(WRONG, "changed"), **{name: page[:-30] for name, page in gzipped(FILES, "truncated").items()},
}
# What the error says of each mirror, in this order.
BAD = {
    "missing.zip": "404", "garbage.zip": "not a zip file", "without.zip": "t10k-labels-idx1-ubyte",
    "cut.zip": "File size is", "changed.zip": "t10k-images-idx3-ubyte has the md5", "silent.zip": "timed out",
    "truncated/": "ended before", "changed/": "t10k-images-idx3-ubyte has the md5",
}


@pytest.fixture(scope="module")
def address():
    """Where the mirrors are."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            page = PAGES.get(self.path, b"")
            self.send_response(200 if page else 404)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            # `download` asks three times; only the third answer, the file itself, has no timeout of its own there.
            if self.path == "/silent.zip" and asked.count(self.path) % 3 == 0:
                time.sleep(1)
            with contextlib.suppress(ConnectionError):
                self.wfile.write(page[:-10] if self.path == "/cut.zip" else page)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache folder; the complete MNIST is the random set."""
    monkeypatch.setattr(fetch, "MD5", {name: hashlib.md5(content).hexdigest() for name, content in FILES.items()})
    monkeypatch.setattr(fetch, "SILENT_SECONDS", 0.3)
    return tmp_path / "cache" / "mnist"


def fetched(cache, monkeypatch, *mirrors):
    """Everything that a fetch leaves in and beside the cache: {name: bytes}."""
    monkeypatch.setattr(fetch, "MIRRORS", mirrors)
    assert fetch.full_set(cache) == cache
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.parent.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mirror", ["good.zip", "good/"])
def test_a_set_is_fetched_once_and_again_when_damaged(address, cache, monkeypatch, mirror, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert fetched(cache, monkeypatch, f"{address}/{mirror}") == FILES
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "file_sizes" in printed.err, "the bar of `download`"
    assert not list(cache.parents[1].rglob("*evil*"))
    assert fetched(cache, monkeypatch) == FILES, "a complete cache needs no mirror"
    write(cache, WRONG)
    assert fetched(cache, monkeypatch, f"{address}/{mirror}") == FILES


def test_bad_mirrors_are_passed_over(address, cache, monkeypatch):
    """Nothing of what they sent is kept, the error has what each of them answered, and the next one is asked."""
    mirrors = [*(f"{address}/{name}" for name in BAD), "http://127.0.0.1:1/set.zip"]  # port 1 is closed
    monkeypatch.setattr(fetch, "MIRRORS", mirrors)
    answers = "; ".join(rf"127\.0\.0\.1:\d+: .*{answer}.*" for answer in (*BAD.values(), "refused"))
    refused = rf"^could not fetch MNIST \({answers}\); use --data embedded, .*, or --data DIR with a folder .*"
    with pytest.raises(OSError, match=refused):
        fetch.full_set(cache)
    assert list(cache.parent.iterdir()) == []
    assert socket.getdefaulttimeout() is None
    assert fetched(cache, monkeypatch, *mirrors, f"{address}/good.zip") == FILES


def test_full_is_fetched_into_the_users_cache_checked_and_an_interrupt_leaves_nothing(address, tmp_path, monkeypatch):
    """With the real md5s, the random set is refused."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert fetch.cache_folder() == tmp_path / "home" / ".cache" / "ms_accum" / "mnist"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(fetch, "MIRRORS", [f"{address}/good.zip"])
    with pytest.raises(OSError, match=r"train-images-idx3-ubyte has the md5 \w{32}, expected 6bbc9ace"):
        data.load("full")
    monkeypatch.setattr(fetch, "download", lambda *_, **options: signal_interrupt())
    with pytest.raises(KeyboardInterrupt):
        data.load("full")
    assert list((tmp_path / "xdg" / "ms_accum").iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot write to the cache .*file.*set XDG_CACHE_HOME"):
        data.load("full")


def signal_interrupt():
    raise KeyboardInterrupt
