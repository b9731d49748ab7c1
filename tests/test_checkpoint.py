"""save_checkpoint and load_checkpoint: bit-identical resume in a fresh process, atomic files, refusals."""
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import checkpointing
import mindspore as ms
import numpy as np
import pytest
from checkpointing import build, load_number, state, train
from conftest import MLP, values
from mindspore import Tensor, nn

from ms_accum import Accumulator, CheckpointError, DataParallel, LocalUpdates, checkpoint_file, load_checkpoint, save_checkpoint
from ms_accum import checkpoint as checkpoint_module

SUFFIXES = [".ckpt", ".safetensors"]


@pytest.fixture(autouse=True)
def _op_by_op(request, monkeypatch):
    if "jit" not in request.node.name:
        monkeypatch.setenv("MS_JIT", "0")


def started(*arguments, **pipes):
    """A process of checkpointing.py."""
    return subprocess.Popen([sys.executable, checkpointing.__file__, *arguments], stdout=subprocess.PIPE, text=True,
                            env={name: value for name, value in os.environ.items() if name != "MS_JIT"}, **pipes)


def output(*arguments):
    process = started(*arguments)
    out, _ = process.communicate()
    assert process.returncode == 0
    return out.splitlines()


CASES = {
    "fused": {},
    "loss scaler": {"scaler": True, "optimizer": "Adam"},
    "sum": {"reduction": "sum"},
    "split, skip_microbatch, float16": {"strategy": "split", "dtype": ms.float16, "optimizer": "SGD", "on_nonfinite": "skip_microbatch"},
    "float16 buffers": {"buffer_dtype": ms.float16},
    "skip_window": {"on_nonfinite": "skip_window", "optimizer": "Adam"},
    "schedule": {"accumulate_step": {0: 2, 2: 3}},
    "one rank": {"reducer": DataParallel()},
    "local updates": {"reducer": LocalUpdates(2)},
}
COMPILED = [("split, skip_microbatch, float16", ".safetensors")]  # and fused in a fresh process


@pytest.mark.parametrize(("mode", "case", "suffix"), [
    *(("pynative", case, SUFFIXES[i % 2]) for i, case in enumerate(CASES)),
    *(pytest.param("jit", case, suffix, marks=[] if (case, suffix) in COMPILED else pytest.mark.slow)
      for case in CASES for suffix in SUFFIXES)])
def test_training_goes_on_bit_identically(mode, case, suffix):
    """Saved in mid-window after 5 of 11 microbatches; network and accumulator built anew with other weights."""
    network, acc, train_step = build(**CASES[case])
    train(acc, train_step, 0, 5)
    assert int(acc.mini_step) > 0
    extra = {"epoch": 3, "position": [1, 2.5, None], "seed": "x", "nan": float("inf")}
    save_checkpoint(f"c{suffix}", network, acc, extra=extra)
    saved = state(network, acc)
    train(acc, train_step, 5, 11)
    uninterrupted = state(network, acc)
    assert uninterrupted != saved

    network, acc, train_step = build(**CASES[case])
    train(acc, train_step, 6, 9)  # whatever happened before is forgotten
    assert state(network, acc) != saved
    assert load_checkpoint(f"c{suffix}", network, acc) == extra
    assert state(network, acc) == saved
    train(acc, train_step, 5, 11)
    assert state(network, acc) == uninterrupted


def test_every_entry_matters():
    """Control of the test above: without one entry, training does not go on bit-identically."""
    network, acc, train_step = build()
    train(acc, train_step, 0, 5)
    save_checkpoint("c.ckpt", network, acc)
    train(acc, train_step, 5, 11)
    uninterrupted = values(network.trainable_params())
    network, acc, train_step = build()
    network.first.weight.set_data(network.first.weight * 2)
    entries = checkpoint_module._entries(network, acc)
    fresh = {name: entry.asnumpy().copy() for name, entry in entries.items()}
    for forgotten in (None, "accumulator:first.weight", "accumulator:mini_step", "accumulator:weight_sum", "optimizer:global_step",
                      "optimizer:moments.first.weight", "first.weight"):
        load_checkpoint("c.ckpt", network, acc)
        if forgotten:
            ms.ops.assign(entries[forgotten], Tensor(fresh[forgotten]))
        train(acc, train_step, 5, 11)
        same = all((a == b).all() for a, b in zip(values(network.trainable_params()), uninterrupted))
        assert same == (forgotten is None), forgotten


def test_in_a_fresh_process():
    """Also with random masks that follow from the position. Control: nn.Dropout, whose kernel does not give its state away."""
    trained, masked, dropped = " ".join(output("run")).split()
    resumed, masked_again, dropped_again = " ".join(output("resume")).split()
    assert (resumed, masked_again) == (trained, masked)
    assert dropped_again != dropped


def test_mindspores_random_state_is_nothing_to_save():
    """It covers no kernel on CPU (MindSpore 2.10). If this fails one day, a checkpoint has to hold it."""
    dropout, x = nn.Dropout(p=0.5).set_train(), Tensor(np.ones((4, 64)), ms.float32)
    for function in (dropout, lambda x: ms.ops.rand(256), lambda x: ms.ops.dropout(x, 0.5, True)):
        before = ms.get_rng_state()
        first = function(x).asnumpy()
        assert np.array_equal(ms.get_rng_state().asnumpy(), before.asnumpy())
        ms.set_rng_state(before)
        assert not np.array_equal(function(x).asnumpy(), first)


def test_learning_rates_of_experimental_optimizers():
    """Which are Parameters, but not where a Cell keeps its own."""
    def build_experimental():
        network = MLP()
        return network, Accumulator(ms.experimental.optim.SGD(network.trainable_params(), lr=0.1), 2)

    network, acc = build_experimental()
    scheduler = ms.experimental.optim.lr_scheduler.StepLR(acc.optimizer, 1, 0.1)
    scheduler.step()
    scheduler.step()
    save_checkpoint("c.ckpt", network, acc)
    network, acc = build_experimental()
    load_checkpoint("c.ckpt", network, acc)
    assert float(acc.optimizer.param_groups[0]["lr"]) == pytest.approx(0.001)


# --- the file -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_mindspore_reads_the_networks_weights(suffix):
    network, acc, _ = build()
    for _ in range(2):
        save_checkpoint(f"c{suffix}", network, acc)
    assert os.listdir() == [f"c{suffix}"]  # nothing is left beside the file
    other = MLP(seed=7)
    missing, _ = ms.load_param_into_net(other, ms.load_checkpoint(f"c{suffix}", format=suffix[1:]))
    assert missing == []
    assert all((a == b).all() for a, b in zip(values(other.trainable_params()), values(network.trainable_params())))


def test_links_modes_and_folders(tmp_path):
    """A link stays one; the file's mode is that of any other new file; a folder that is not there is named."""
    network, acc, _ = build()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "c.ckpt").symlink_to(tmp_path / "elsewhere" / "real.ckpt")
    umask = os.umask(0o027)
    try:
        save_checkpoint("c.ckpt", network, acc)
    finally:
        os.umask(umask)
    assert (tmp_path / "c.ckpt").is_symlink()
    assert (tmp_path / "elsewhere" / "real.ckpt").stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist"):
        save_checkpoint("nowhere/c.ckpt", network, acc)


def test_earlier_generations_of_a_rank_are_removed_and_nothing_else(tmp_path):
    """Also half-written ones, and if the name looks like a pattern."""
    path, new = tmp_path / "g[1].ckpt", "f" * 16
    mine = checkpoint_file.path_of_rank(path, 1, 2, new)
    old = [f"g[1].rank1of2-{'0' * 16}.ckpt", f".g[1].rank1of2-{'1' * 16}.part-0123abcd-4711-89abcdef.ckpt",
           f".g[1].rank1of2-{'1' * 16}.part-0123abcd-4711-89abcdef.tmp"]
    others = [mine.name, "g[1].ckpt", f"g[1].rank0of2-{new}.ckpt", f"g[1].rank1of4-{new}.ckpt", f"g1.rank1of2-{new}.ckpt",
              "g[1].rank1of2.ckpt"]
    for name in old + others:
        (tmp_path / name).touch()
    checkpoint_file.remove_generations(path, 1, 2, mine)
    assert sorted(os.listdir()) == sorted(others)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_files_are_refused(suffix):
    """Truncated anywhere, one bit flipped anywhere: one clear error, nothing loaded."""
    network, acc, train_step = build()
    path = Path(f"c{suffix}")
    save_checkpoint(path, network, acc)
    whole = path.read_bytes()
    train(acc, train_step, 0, 2)
    before = state(network, acc)
    damaged = [whole[:n] for n in (0, 1, 100, len(whole) // 2, len(whole) - 1)]
    for bit in random.Random(0).sample(range(8 * len(whole)), 60):
        damaged.append(whole[:bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1:])
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"c\.\w+ is (truncated, or no checkpoint of ms_accum|damaged \(SHA-256 mismatch\))"):
            load_checkpoint(path, network, acc)
    assert state(network, acc) == before
    path.write_bytes(whole)
    load_checkpoint(path, network, acc)  # control


class Malice:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_made_up_file_executes_nothing():
    """A pickle under a right checksum is not opened as one."""
    network, acc, _ = build()
    data = checkpoint_file._BLANK + b'"}' + pickle.dumps(Malice())
    for suffix in SUFFIXES:
        Path(f"c{suffix}").write_bytes(data.replace(b"0" * 64, sha256(data).hexdigest().encode()))
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_checkpoint(f"c{suffix}", network, acc)
    assert not os.path.exists("executed")
    pickle.loads(pickle.dumps(Malice()))  # control: it would have
    assert os.path.exists("executed")


def test_bad_arguments_and_foreign_files_are_refused():
    network, acc, _ = build()
    for function in (save_checkpoint, load_checkpoint):
        with pytest.raises(TypeError, match=r"accumulator is of type \w+, expected an Accumulator; give path, network"):
            function("c.ckpt", network, acc.optimizer)
        with pytest.raises(TypeError, match=r"network is of type Accumulator, expected a mindspore\.nn\.Cell; give path, network"):
            function("c.ckpt", acc, network)
        for name in ("c.npz", "c"):
            with pytest.raises(ValueError, match=r"c(\.npz)? ends in '(\.npz)?', expected one of \.ckpt, \.safetensors"):
                function(name, network, acc)

    def step(grads):
        return True

    step.parameters = tuple(network.trainable_params())
    with pytest.raises(TypeError, match=r"the optimizer is of type function, expected an nn\.Cell, whose state can be found"):
        save_checkpoint("c.ckpt", network, Accumulator(step, 2))
    for extra in ({1: 2}, (1, 2), np.float32(1), {"a": {1, 2}}, object()):
        with pytest.raises(TypeError, match=r"extra (cannot be written as JSON \(.*give dicts|would come back .* give lists for tuples)"):
            save_checkpoint("c.ckpt", network, acc, extra=extra)
    assert os.listdir() == []
    ms.save_checkpoint(network, "foreign.ckpt")
    with pytest.raises(CheckpointError, match=r"foreign\.ckpt is truncated, or no checkpoint of ms_accum; give a file that"):
        load_checkpoint("foreign.ckpt", network, acc)
    with pytest.raises(FileNotFoundError):
        load_checkpoint("missing.ckpt", network, acc)


def refused(message, network, acc):
    """That c.ckpt is refused, and nothing of it is loaded."""
    before = state(network, acc)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint("c.ckpt", network, acc)
    assert state(network, acc) == before


def test_another_run_is_refused_and_nothing_loaded():
    network, acc, train_step = build()
    train(acc, train_step, 0, 5)
    save_checkpoint("c.ckpt", network, acc)
    for other, message in (
            ({"accumulate_step": 4}, r"was saved with accumulate_step 3, but this run has 4; build it alike"),
            ({"reduction": "sum"}, r"was saved with reduction mean, but this run has sum"),
            ({"on_nonfinite": "skip_window"}, r"was saved with on_nonfinite apply, but this run has skip_window"),
            ({"hidden": 6}, r"first\.weight has shape \(5, 6\), but this run's has \(6, 6\)"),
            ({"optimizer": "Adam"}, r"has no entry optimizer:(beta1_power|moment1\.first\.weight), which this run needs"),
            ({"optimizer": "SGD"}, r"has no entry optimizer:\S+, which this run needs; build network, optimizer and"),
            ({"buffer_dtype": ms.float16}, r"accumulator:first\.weight is of Float32, but this run's of Float16"),
            ({"scaler": True}, r"has no entry accumulator:loss_scaler\.scale_value, which this run needs")):
        network, acc, _ = build(**other)
        refused(message, network, acc)
    network, acc, _ = build(scaler=True)
    save_checkpoint("c.ckpt", network, acc)
    network, acc, _ = build()
    refused(r"has the entry accumulator:loss_scaler\.scale_value, which this run does not know; build network", network, acc)


def test_a_loss_scale_that_nothing_can_be_divided_by_is_not_loaded():
    network, acc, _ = build(scaler=True)
    for scale in (np.nan, np.inf, 0, -2):
        acc.loss_scaler.scale_value.set_data(Tensor(scale, ms.float32))
        save_checkpoint("c.ckpt", network, acc)
        acc.loss_scaler.scale_value.set_data(Tensor(1024, ms.float32))
        refused(r"in accumulator:loss_scaler\.scale_value, the loss scale is .*, expected one finite number", network, acc)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Whole and flushed, then renamed, then the folder: whatever the power cuts off, one of the two files is there."""
    done = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(("fsync", path.name, path.read_bytes() if path.is_file() else None))
        fsync(descriptor)

    def seen_replace(part, path):
        done.append(("rename", Path(part).name, Path(path).name))
        replace(part, path)

    network, acc, _ = build()
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    save_checkpoint("c.ckpt", network, acc)
    part = done[0][1]
    assert part.startswith(".c.part-")
    assert done == [("fsync", part, Path("c.ckpt").read_bytes()), ("rename", part, "c.ckpt"), ("fsync", tmp_path.name, None)]


# --- several processes --------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file():
    network, acc, _ = build()
    paths = [Path(f"c{suffix}") for suffix in SUFFIXES]
    for path in paths:
        save_checkpoint(path, network, acc, extra="old")
    old = [path.read_bytes() for path in paths]
    assert output("fill_disk", *map(str, paths)) == ["OSError"] * 2
    assert [path.read_bytes() for path in paths] == old
    assert sorted(os.listdir()) == sorted(map(str, paths))


def test_two_processes_save_to_one_path():
    """None fails, and whoever reads finds one of their files, whole; in the end one of the last two. In both formats."""
    paths = [f"c{suffix}" for suffix in SUFFIXES]
    processes = [started("save_at_once", start, *paths, stdin=subprocess.PIPE, stderr=subprocess.PIPE) for start in ("100", "200")]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    network, acc, _ = build(hidden=500)
    seen = set()
    while any(process.poll() is None for process in processes):
        seen.update(load_number(path, network, acc) for path in paths if os.path.exists(path))
    assert [(process.wait(), process.stderr.read()) for process in processes] == [(0, ""), (0, "")]
    assert seen <= {*range(100, 110), *range(200, 210)}
    assert {load_number(path, network, acc) for path in paths} <= {109, 209}
    assert sorted(os.listdir()) == sorted(paths)


def test_what_a_dead_process_left_is_removed_by_the_next_save(tmp_path):
    """And nothing of a living one, of another host or of another path."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    parts = checkpoint_file._parts_of(tmp_path / "c.ckpt")
    of_dead = [f"{parts}{dead.pid}-01234567{suffix}" for suffix in (".ckpt", ".tmp", ".safetensors")]
    others = [f"{parts}{os.getpid()}-01234567.ckpt", f"{parts}1-01234567.tmp",
              f".c.part-{'0' * 8}-{dead.pid}-01234567.ckpt", f".d{parts[2:]}{dead.pid}-01234567.ckpt"]
    for name in of_dead + others:
        (tmp_path / name).touch()
    network, acc, _ = build()
    save_checkpoint("c.ckpt", network, acc)
    assert sorted(os.listdir()) == sorted(["c.ckpt", *others])


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_while_saving(kills):
    """Killed while it saves without end, again and again; each next process finds a whole checkpoint, at least as new as was said."""
    rng, said = random.Random(kills), 0
    for i in range(kills):
        process = started("resume_save_on" if i else "save_on", "c.ckpt")
        ready = process.stdout.readline().split()
        assert ready[:1] == ["ready"], f"kill {i}: the checkpoint is not whole"
        assert said <= int(ready[1]) <= said + 1
        if i == 0:
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        lines = process.communicate()[0].split()
        said = int(lines[-1]) if lines else max(int(ready[1]), 1 if i == 0 else 0)
    network, acc, _ = build(hidden=2000)
    assert said <= load_number("c.ckpt", network, acc) <= said + 1
    save_checkpoint("c.ckpt", network, acc)
    assert os.listdir() == ["c.ckpt"]
