"""DataParallel in real processes, started by msrun: 2 and 4 ranks against NumPy, traffic, refusals, a killed rank."""
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import ranks as workers
import reference
from conftest import MLP, difference, values
from mindspore import nn

from ms_accum import Accumulator, DataParallel, load_checkpoint, make_train_step
from ms_accum.checkpoint import CheckpointError
from ms_accum.cli import main as cli
from ms_accum.cli import mnist as command
from ms_accum.distributed import reducers
from ms_accum.mnist.network import Network

RANKS = Path(workers.__file__)
ARTICLE = [0.9472, 0.9440, 0.9527, 0.9687, 0.9570, 0.9343, 0.9411, 0.9186]  # published

pytestmark = pytest.mark.skipif(shutil.which("msrun", path=Path(sys.executable).parent) is None, reason="MindSpore without msrun")

# Op by op a scenario takes 0.2 s; to compile it takes 3 to 8 s, so the rest of the matrix is compiled for a part of it.
MATRIX = {
    2: [*(f"matrix:{sync}:{sizes}:{optimizer}:pynative"
          for sync in workers.SYNCS for sizes in workers.SIZES for optimizer in workers.OPTIMIZERS),
        "matrix:window:uneven:Momentum", "matrix:microbatch:unequal:SGD:split", "matrix:shard:uneven:Adam"],
    4: [*(f"matrix:{sync}:{sizes}:Momentum:pynative" for sync in workers.SYNCS for sizes in workers.SIZES),
        "matrix:window:uneven:Adam:pynative"],
}
OTHERS = {
    2: ["article", "refusals", "summed:window:pynative", "summed:shard:pynative", "traffic:window", "traffic:microbatch",
        "unchanged_between_boundaries:pynative", "overflow:pynative",
        "nonfinite:window:skip_window:pynative", "nonfinite:window:skip_microbatch",
        "nonfinite:shard:skip_microbatch:pynative", "nonfinite:microbatch:skip_window:pynative", "nonfinite:window:apply:pynative",
        "compiled_before", *(f"weight_zero:{sync}:pynative" for sync in workers.SYNCS),
        "noise:window:pynative", "noise:microbatch:pynative", "noise:window:skip_microbatch:pynative", "noise:shard:pynative",
        "resume:window:ckpt:pynative", "resume:microbatch:ckpt:pynative", "resume:shard:safetensors:pynative"],
    4: ["nonfinite:window:skip_microbatch:pynative"],
}
# With `pytest -m slow`.
COMPILED = {
    2: [*(f"matrix:{sync}:{sizes}:Momentum" for sync in workers.SYNCS for sizes in workers.SIZES),
        *(f"matrix:{sync}:uneven:SGD:graph" for sync in workers.SYNCS), "matrix:shard:uneven:Adam:split",
        "nonfinite:window:skip_window", "nonfinite:shard:skip_microbatch", "nonfinite:microbatch:skip_window", "overflow",
        "noise:window", "noise:shard", "noise:microbatch:skip_microbatch", "resume:window:ckpt", "resume:shard:safetensors"],
    4: [f"matrix:{sync}:uneven:Adam" for sync in workers.SYNCS],
}


def msrun(count, folder, *arguments, **options):
    """`msrun` with `count` ranks in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).parent / "msrun", f"--worker_num={count}", f"--local_worker_num={count}", f"--master_port={port}",
               "--join=True", f"--log_dir={folder / 'logs'}", *arguments]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.Popen(list(map(str, command)), cwd=folder, env=environment, text=True, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all of the session's processes share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def run(shared):
    """`run(count, compiled)`: the arrays that each scenario of `count` ranks left, by rank; the session's processes share one run."""

    def results(count, compiled=False):
        folder = shared / f"ranks{count}{'-compiled' * compiled}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "status").exists():
                process = msrun(count, folder, RANKS, folder, *(COMPILED[count] if compiled else MATRIX[count] + OTHERS[count]))
                output, _ = process.communicate(timeout=900)
                (folder / "status").write_text(f"{process.returncode}\n{output[-3000:]}", encoding="utf-8")
        status = (folder / "status").read_text(encoding="utf-8")
        assert status.startswith("0\n"), status
        return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(count)]

    return results


def of(results, scenario):
    """What a scenario left on each rank."""
    found = [{key.rsplit("/", 1)[1]: value for key, value in arrays.items() if key.rsplit("/", 1)[0] == scenario} for arrays in results]
    assert all(found), f"{scenario} left nothing"
    return found


def parameters(arrays):
    return [arrays[f"parameter{i}"] for i in range(4)]


def scenarios(kind):
    """`(count, scenario, compiled)` of a kind; those that are compiled for `pytest -m slow` are marked so."""
    usual = [(count, name, False) for count in (2, 4) for name in MATRIX[count] + OTHERS[count] if name.startswith(kind)]
    slow = [(count, name, True) for count in (2, 4) for name in COMPILED[count] if name.startswith(kind)]
    return [*usual, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]


def windows_of(sizes, count, skipped=()):
    """The undivided batches: what all ranks have in each window, without microbatches (by index) that all of them skip."""
    batches = [workers.microbatches(sizes, rank) for rank in range(count)]
    kept = [i for i in range(max(map(len, batches))) if i not in skipped]
    groups = [kept[i:i + workers.N] for i in range(0, len(kept), workers.N)]
    pairs = [[batches[rank][i] for rank in range(count) for i in group if i < len(batches[rank])] for group in groups]
    return [tuple(map(np.concatenate, zip(*window))) for window in pairs]


ORACLES = {
    "SGD": lambda: reference.SGD(0.1),
    "Momentum": lambda: reference.SGD(0.1, 0.9),
    "Adam": lambda: reference.Adam(0.01),
}


def undivided(windows, optimizer, clip_norm=0.5):
    """The oracle: one process, each window as one batch."""
    oracle = reference.Accumulation(values(MLP(seed=0).trainable_params()), ORACLES[optimizer](), 1, "mean", clip_norm)
    for x, y in windows:
        oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1])
    return oracle


@pytest.mark.parametrize(("count", "scenario", "slow"), scenarios("matrix"))
def test_ranks_train_as_one_process_on_the_undivided_batch(run, count, scenario, slow):
    """{window, microbatch, shard} x {equal, unequal weights, uneven numbers of microbatches} x short last window x clipping."""
    sizes, optimizer = scenario.split(":")[2:4]
    oracle = undivided(windows_of(sizes, count), optimizer)
    results = of(run(count, slow), scenario)
    for rank, arrays in enumerate(results):
        assert difference(parameters(arrays), oracle.parameters) <= (1e-5 if optimizer == "Adam" else 1e-6), f"rank {rank}"
        assert arrays["counters"].tolist() == [3, 0, 0]
        assert float(arrays["grad_norm"]) == pytest.approx(oracle.grad_norm, rel=1e-5)
        for mine, others in zip(parameters(arrays), parameters(results[0])):
            assert np.array_equal(mine, others), "ranks hold different parameters"


def test_wrong_weights_are_seen():
    """Negative control: ranks with unequal samples that all count the same are not the undivided batch."""
    windows = windows_of("unequal", 2)
    right = undivided(windows, "SGD")
    wrong = undivided([(np.concatenate([x, x[:2]]), np.concatenate([y, y[:2]])) for x, y in windows], "SGD")
    assert difference(wrong.parameters, right.parameters) > 1e-4


@pytest.mark.parametrize("sync", ["window", "shard"])
def test_sum_is_averaged_over_ranks(run, sync):
    batches = [workers.microbatches("equal", rank) for rank in range(2)]
    oracle = reference.Accumulation(values(MLP(seed=0).trainable_params()), reference.SGD(0.1), workers.N)
    for pieces in zip(*batches):
        gradients = [reference.loss_and_gradients(oracle.parameters, x, y)[1] for x, y in pieces]
        oracle([sum(g) / 2 / workers.N for g in zip(*gradients)])
    oracle.flush()
    for arrays in of(run(2), f"summed:{sync}:pynative"):
        assert difference(parameters(arrays), oracle.parameters) <= 1e-6


def test_shards_are_a_part_of_the_buffers(run):
    whole = sum(p.nbytes for p in MLP().trainable_params())
    for ranks in (2, 4):
        for scenario in MATRIX[ranks]:
            for arrays in of(run(ranks), scenario):
                held = int(arrays["buffers"])
                if ":shard:" in scenario:
                    assert whole / ranks <= held <= whole / ranks + 3 * 4  # padding: at most one element for each of three buckets
                else:
                    assert held == whole


# --- the published experiment, and Colossal-AI's check -------------------------------------------------------------------


def test_article_in_two_processes(run):
    for arrays in of(run(2), "article"):
        assert [f"{w:.4f}" for w in arrays["weights"]] == [f"{w:.4f}" for w in ARTICLE]


@pytest.mark.parametrize(("divisor", "same"), [(2, True), (1, False)])
def test_article_in_one_process(divisor, same):
    """Two microbatches, loss / 2; control: without the division the weights are others."""
    rows = np.array(json.loads((RANKS.parent / "article_rand8x8.json").read_text(encoding="utf-8"))["rows"], np.float32)
    network = nn.Dense(8, 1, weight_init="ones", has_bias=False)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.01, 0.9), 2)
    weights = workers.train_article(network, acc, [rows[0::2], rows[1::2]], divisor)
    assert ([f"{w:.4f}" for w in weights] == [f"{w:.4f}" for w in ARTICLE]) == same


def test_parameters_stand_still_between_boundaries(run):
    for arrays in of(run(2), "unchanged_between_boundaries:pynative"):
        seen = arrays["seen"]
        assert seen.shape == (9, 10)
        assert [not np.array_equal(seen[i], seen[i + 1]) for i in range(8)] == [False, False, False, True] * 2


def test_graphs_compiled_before_follow_rank_0(run):
    for arrays in of(run(2), "compiled_before"):
        assert np.array_equal(arrays["seen"], arrays["expected"])


# --- decisions are the same on every rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "scenario", "slow"), scenarios("nonfinite"))
def test_one_ranks_nan_is_everybodys(run, count, scenario, slow):
    """Rank 1's second microbatch holds a NaN: all skip that microbatch, or all drop that window."""
    on_nonfinite = scenario.split(":")[2]
    results = of(run(count, slow), scenario)
    if on_nonfinite == "apply":  # control: there is something to skip
        assert all(np.isnan(p).any() for arrays in results for p in parameters(arrays))
        return
    windows = windows_of("uneven", count, skipped=(1,)) if on_nonfinite == "skip_microbatch" else windows_of("uneven", count)[1:]
    oracle = undivided(windows, "SGD")
    for arrays in results:
        assert arrays["counters"].tolist() == [len(windows), 0, 1]
        assert difference(parameters(arrays), oracle.parameters) <= 1e-6


@pytest.mark.parametrize("sync", workers.SYNCS)
def test_a_weight_of_zero_counts_nothing_on_any_rank(run, sync):
    """Three microbatches of gradient 1 and weight 1, and a NaN of weight 0."""
    for arrays in of(run(2), f"weight_zero:{sync}:pynative"):
        for start, value in zip(values(MLP(seed=0).trainable_params()), parameters(arrays)):
            np.testing.assert_allclose(value, start - 0.1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("count", "scenario", "slow"), scenarios("overflow"))
def test_one_ranks_overflow_halves_everybodys_scale(run, count, scenario, slow):
    for arrays in of(run(count, slow), scenario):
        assert float(arrays["scale"]) == 512
        assert arrays["counters"].tolist() == [2, 0, 1]
        assert arrays["finite"]


# --- the noise scale ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "scenario", "slow"), scenarios("noise"))
def test_microbatches_of_all_ranks_are_in_the_noise_scale(run, count, scenario, slow):
    """The estimates of one process that has the microbatches of all ranks; controls: those of one rank, or of their sums, are others."""
    parameters = values(MLP(seed=0).trainable_params())

    def pair(x, y):
        return np.concatenate([g.reshape(-1) for g in reference.loss_and_gradients(parameters, x, y)[1]]), len(x)

    batches = [workers.microbatches("uneven", rank) for rank in range(count)]
    together = [[batch[i] for batch in batches if i < len(batch)] for i in range(max(map(len, batches)))]
    windows = [[pair(x, y) for each in together[i:i + workers.N] for x, y in each] for i in range(0, len(together), workers.N)]
    expected = reference.noise_and_signal(windows, 0.9)
    sums = [[pair(*map(np.concatenate, zip(*each))) for each in together[i:i + workers.N]] for i in range(0, len(together), workers.N)]
    one = [[pair(x, y) for x, y in batches[0][i:i + workers.N]] for i in range(0, len(batches[0]), workers.N)]
    for wrong in (sums, one):
        assert abs(reference.noise_and_signal(wrong, 0.9)[0] / expected[0] - 1) > 0.02
    for arrays in of(run(count, slow), scenario):
        np.testing.assert_allclose(arrays["found"], expected, rtol=1e-4)


# --- traffic -------------------------------------------------------------------------------------------------------------


def test_traffic_of_a_window_is_that_of_one_microbatch(run):
    """16 microbatches, N = 8, counted where the collectives are called: one bucket a window, the gradients and a header of 12 bytes."""
    window, microbatch = (of(run(2), f"traffic:{sync}")[0] for sync in ("window", "microbatch"))
    assert (int(window["collectives"]), int(microbatch["collectives"])) == (2, 16)
    assert int(window["bytes"]) == 2 * (int(window["parameters"]) + 12)
    assert int(window["bytes"]) * 8 == int(microbatch["bytes"])


# --- checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "scenario", "slow"), scenarios("resume"))
def test_each_rank_resumes_bit_identically(run, count, scenario, slow):
    """In mid-window; if one rank cannot save, none does and nothing is left; if one rank's file is damaged, nothing is loaded on any."""
    for rank, arrays in enumerate(of(run(count, slow), scenario)):
        assert str(arrays["refused"]) == ("TypeError" if rank == 1 else "OSError")
        assert int(arrays["files"]) == count
        assert int(arrays["mini_step"]) == 1
        assert json.loads(str(arrays["extra"])) == {"rank": rank}
        assert arrays["same"]
        assert arrays["untouched"]
        assert ("is truncated" in str(arrays["said"]) or "is damaged" in str(arrays["said"])) if rank == 1 else (
            str(arrays["said"]) == "rank 1 failed, and so nothing was done on this one; see its message")


def test_checkpoints_of_other_numbers_of_ranks_are_refused(run, shared):
    run(2)
    folder = shared / "ranks2"
    assert len(list(folder.glob("resume-window.*"))) == 2, "the first generation is removed"
    network = MLP()
    acc = Accumulator(nn.Momentum(network.trainable_params(), 0.1, 0.9), workers.N, 0.5, reduction="mean")
    with pytest.raises(CheckpointError, match=r"was saved with ranks 2, but this run has 1; build it alike"):
        load_checkpoint(folder / "resume-window.ckpt", network, acc)


# --- refusals, and one rank ----------------------------------------------------------------------------------------------


def test_ranks_that_are_not_alike_are_refused(run):
    for arrays in of(run(2), "refusals"):
        schedule, seed, same, rate, scale, pieces = arrays["said"].tolist()
        assert rate.startswith("rank 1 and rank 0 differ in the optimizer, its learning rate or state; ")
        assert scale == "rank 1 and rank 0 differ in the loss_scaler; give every rank the same one"
        assert schedule == "rank 1 and rank 0 differ in accumulate_step; give every rank the same network and arguments"
        assert seed.startswith("rank 1 and rank 0 differ in the values of first.weight, the values of first.bias, ")
        assert seed.endswith("give every rank the same seed, or broadcast=True")
        assert same == "accepted"
        assert pieces.startswith("micro_size=2 with an accumulator whose ranks exchange each microbatch")


@pytest.mark.parametrize(("error", "message", "arguments"), [
    (ValueError, r"sync is 'epoch', expected one of 'window', 'microbatch'", {"sync": "epoch"}),
    (TypeError, r"shard is 1, expected True or False", {"shard": 1}),
    (TypeError, r"broadcast is None, expected True or False", {"broadcast": None}),
    (ValueError, r"shard=True with sync=\"window\": .* give sync=\"microbatch\"", {"shard": True}),
    (ValueError, r"bucket_mib is 0, expected a number of mebibytes > 0", {"bucket_mib": 0}),
    (ValueError, r"bucket_mib is nan, expected", {"bucket_mib": float("nan")}),
    (TypeError, r"bucket_mib is '1', expected", {"bucket_mib": "1"}),
])
def test_bad_arguments_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        DataParallel(**arguments)


def test_an_accumulator_before_init_is_refused(monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    with pytest.raises(RuntimeError, match=r"msrun started several ranks, .* call mindspore.communication.init\(\) before"):
        Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, reducer=DataParallel())


def test_float64_between_cpu_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(reducers, "world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"DataParallel with buffers of float64: .* give buffer_dtype=ms.float32"):
        Accumulator(nn.SGD(MLP().trainable_params(), 0.1), 2, buffer_dtype=ms.float64, reducer=DataParallel())


def test_comparing_on_ranks_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(command, "join_ranks", lambda settings: replace(settings, ranks=2))
    assert cli.main(["mnist", "--compare"]) == 2
    assert "argument --compare: several ranks do not compare" in capsys.readouterr().err


@pytest.mark.parametrize(("jit", "sync"), [
    *(("0", sync) for sync in workers.SYNCS), ("1", "window"),
    *(pytest.param("1", sync, marks=pytest.mark.slow) for sync in workers.SYNCS if sync != "window")])
def test_without_other_ranks_it_accumulates_on_one(monkeypatch, jit, sync):
    """No process group: the same script, the same parameters to the bit as without a reducer."""
    monkeypatch.setenv("MS_JIT", jit)
    trained = []
    for reducer in (None, workers.SYNCS[sync]):
        network = MLP(seed=0)
        acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, 0.5, reduction="mean", reducer=reducer)
        train_step = make_train_step(workers.mean_loss(network), acc)
        _, counters = workers.train(acc, train_step, workers.microbatches("unequal", 0))
        assert counters == [3, 0, 0]
        trained.append(values(network.trainable_params()))
    assert all(np.array_equal(a, b) for a, b in zip(*trained))


# --- ms-accum mnist ------------------------------------------------------------------------------------------------------


def test_mnist_on_two_ranks_is_one_process_with_windows_twice_as_long(tmp_path):
    """Sharded digits (157 and 156 microbatches), the same update; only rank 0 prints, checkpoints on the way, and both end."""
    folders = [tmp_path / name for name in ("two", "one")]
    for folder in folders:
        folder.mkdir()
    options = ["--epochs", "2", "--clip-norm", "1", "--json", "run.json", "--save", "run.ckpt"]
    process = msrun(2, folders[0], "python", "-m", "ms_accum", "mnist", *options, "--save-every", "50")
    alone = subprocess.run([sys.executable, "-m", "ms_accum", "mnist", *options, "--accumulate-step", "4"], cwd=folders[1],
                           capture_output=True, text=True, check=False)
    output, _ = process.communicate(timeout=300)
    assert (process.returncode, alone.returncode) == (0, 0), output + alone.stderr
    two, one = (json.loads((folder / "run.json").read_text(encoding="utf-8")) for folder in folders)
    assert (two["ranks"], one["ranks"]) == (2, 1)
    assert two["update_step"] == one["update_step"] == 158
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.2)
    names = [p.name for p in Network(0).trainable_params()]
    trained = [ms.load_checkpoint(str(folder / "run.ckpt")) for folder in folders]
    assert difference(*(values(parameters[name] for name in names) for parameters in trained)) <= 1e-3  # float32, 158 updates, and ReLU
    logs = [(folders[0] / "logs" / f"worker_{rank}.log").read_text(encoding="utf-8") for rank in range(2)]
    assert ["epoch 2/2  loss" in log for log in logs] == [True, False]
    assert "32 x 2 x 2 ranks = 128 digits an update, gradients exchanged each window" in logs[0]
    assert [re.sub("-[0-9a-f]{16}", "", name) for name in sorted(path.name for path in folders[0].glob("*run.*"))] == [
        "run.ckpt", "run.json", "run.rank1of2.ckpt"]
    assert [line for log in logs for line in log.splitlines() if "eliminated by mistake" in line] == []


@pytest.mark.parametrize(("options", "message"), [
    (["--shard"], "argument --shard: gradients of a rank are whole until they are exchanged; add --sync microbatch"),
    (["--sync", "microbatch", "--micro-size", "2"], "argument --micro-size: ranks that exchange each microbatch cannot cut it"),
])
def test_mnist_refuses_what_ranks_cannot_do(options, message, capsys):
    assert cli.main(["mnist", *options]) == 2
    assert message in capsys.readouterr().err


# --- a rank dies ---------------------------------------------------------------------------------------------------------

DYING = """
import os, signal, sys
import mindspore as ms, numpy as np
from mindspore import nn, Tensor
from mindspore.communication import init, get_rank
from ms_accum import Accumulator, DataParallel, avoid_busy_waiting, make_train_step
avoid_busy_waiting()
init()
network = nn.Dense(4, 1)
def forward_fn(x):
    return network(x).mean()
acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean", reducer=DataParallel())
train_step = make_train_step(forward_fn, acc)
for i in range(1000000):
    train_step(Tensor(np.ones((2, 4)), ms.float32))
    if i == 100:
        print("training", flush=True)
        if get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_ends_the_run(tmp_path):
    """With a message and a non-zero status, within the cluster's timeout, and nobody left behind."""
    (tmp_path / "dying.py").write_text(DYING, encoding="utf-8")
    start = time.monotonic()
    process = msrun(2, tmp_path, tmp_path / "dying.py")
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        alive = processes_of(process.pid)
        if alive:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode not in (0, None)
    assert "training" in (tmp_path / "logs" / "worker_1.log").read_text(encoding="utf-8")
    assert re.search(r"worker_\d|rank", output), output
    assert "exception" in output.lower(), output
    assert alive == [], f"{time.monotonic() - start:.0f} s"


def processes_of(session):
    """Processes of a session that are still there."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            found.append(int(stat.parent.name))
    return found
