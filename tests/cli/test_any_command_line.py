"""Any command line runs, or is refused in one line."""
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from mnist_files import embedded_set, write

from ms_accum.cli import main as cli
from ms_accum.mnist import fetch
from ms_accum.reference import train

OPTIONS = ["--data", "--batch-size", "--accumulate-step", "--epochs", "--lr", "--momentum", "--optimizer", "--clip-norm", "--seed",
           "--device-target", "--mode", "--pieces", "--sync", "--json", "--plot", "--save"]
TEXTS = st.one_of(
    st.sampled_from([
        "", "0", "1", "-1", "nan", "inf", "1e400", "1e-300", "9" * 5000, "1_0", "0x10", "2147483648", "~", "~nobody-of-that-name",
        "/", ".", "/dev/null", "run.json", "run.png", "run.ckpt", "a/b", "a\0b", "\udcff", "%s", "--", "-", "--lr", "a" * 300,
        "\x1b[31m", "sgd", "graph", "pynative", "microbatch", "CPU", "GPU", "full"]),
    st.text(st.characters(codec=None, exclude_characters="/"), max_size=8))  # writes into the scratch folder only


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_command_line_runs_or_is_refused_in_one_line(monkeypatch, tmp_path, capfd, count):
    """Without its training; the digits are few, the cache is empty and there are no mirrors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "MIRRORS", ())
    monkeypatch.setattr(train, "train", lambda *_: iter([train.Epoch(1, 0.5, 50.0, 1.0, 1.0, 1, np.zeros(1))]))
    data = str(write(tmp_path / "digits", embedded_set(9, 5)))

    @settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(st.lists(st.one_of(
        st.tuples(st.sampled_from(OPTIONS), TEXTS).map("=".join), st.sampled_from(["--shard", "--compare"]), TEXTS), max_size=4))
    @example(["--json=--"])  # these once ended in a traceback
    @example(["--batch-size=--"])
    @example(["--data=~nobody-of-that-name"])
    def run(arguments):
        assume(not any(argument.startswith("-h") for argument in arguments))
        status = cli.main(["mnist", "--data", data, "--batch-size", "3", *arguments])
        captured = capfd.readouterr()
        if status == 0:
            assert ("epoch 1/" in captured.out, captured.err) == (True, "")
        else:
            assert (status, captured.out) in ((2, ""), (1, ""))
            assert re.fullmatch(r"ms-accum( mnist)?: error: .+\n", captured.err)

    run()
