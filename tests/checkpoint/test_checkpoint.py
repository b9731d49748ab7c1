"""save_checkpoint and load_checkpoint: bit-identical resume, also after kill -9, atomic files, refusals."""
import os
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from safetensors import safe_open
from safetensors.numpy import save_file

import ms_accum
from ms_accum import Accumulator, CheckpointError, TrainOneStepCell, load_checkpoint, make_train_step, save_checkpoint
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.checkpoint.file import part_of
from ms_accum.selftest.comparing import difference, values
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = pytest.mark.usefixtures("uncompiled")
OPTIMIZERS = {"Momentum": lambda weights: nn.Momentum(weights, nn.exponential_decay_lr(0.1, 0.9, 100, 1, 1), 0.9),
              "Adam": lambda weights: nn.Adam(weights, 0.01)}
BATCHES = batches([4, 6, 4, 4, 6, 6, 6, 4, 4, 6, 4, 6])


def build(optimizer="Momentum", hidden=5, accumulate_step=3, reduction="mean", scaler=False, **options):
    """A network, its accumulator, and the train step that feeds it; by hand for sums."""
    network = MLP(hidden=hidden)
    optimizer = OPTIMIZERS[optimizer](network.trainable_params())
    options = {"clip_norm": 0.5, "loss_scaler": amp.DynamicLossScaler(1024, 2, 2) if scaler else None, **options}
    if reduction == "sum":
        return network, Accumulator(optimizer, accumulate_step, reduction="sum", **options), None
    train_step = make_train_step(mean_loss(network), optimizer, accumulate_step, **options)
    return network, train_step.accumulator, train_step


def train(train_step, first, last):
    """Microbatches `first` to `last` of a fixed sequence."""
    for i in range(first, last):
        train_step(*tensors(*BATCHES[i % len(BATCHES)]))


def state(network, acc):
    """Every bit of state."""
    parameters = (*network.get_parameters(), *acc.optimizer.get_parameters(), *acc.state.values())
    return [p.asnumpy().tobytes() for p in parameters]


def run(path, last):
    """Train to microbatch `last`, saved and printed after each, from the file if there is one. Return a digest."""
    network, acc, train_step = build(hidden=300)
    for i in range(load_checkpoint(path, network, train_step) if os.path.exists(path) else 0, last):
        train(train_step, i, i + 1)
        save_checkpoint(path, network, train_step, extra=i + 1)
        print(i + 1, flush=True)
    return sha256(b"".join(state(network, acc))).hexdigest()


def test_training_goes_on_bit_identically():
    """Into a run that was used before; a schedule of windows, a noise scale.

    Saved in an open window after 5 of 11 microbatches, and in the next closed one. For the rest see test_machine.py and
    test_differential.py.
    """
    def make():
        return build(accumulate_step={0: 2, 2: 3}, stages=(GradientNoiseScale(),))

    network, acc, train_step = make()
    extra, saved = {"epoch": 3, "position": [1, 2.5, None], "seed": "x", "nan": float("inf")}, {}
    for i in range(11):
        if i == 5 or (i > 5 and int(acc.mini_step) == 0 and len(saved) == 1):
            saved[i] = int(acc.mini_step), state(network, acc)
            save_checkpoint(f"{i}.safetensors", network, train_step, extra=extra)
        train(train_step, i, i + 1)
    uninterrupted = state(network, acc)
    assert [held > 0 for held, _ in saved.values()] == [True, False]
    for i, (held, then) in saved.items():
        network, acc, train_step = make()
        train(train_step, 8, 12 if held else 8)
        assert state(network, acc) not in (then, uninterrupted)
        assert load_checkpoint(f"{i}.safetensors", network, train_step) == extra
        assert state(network, acc) == then
        train(train_step, i, 11)
        assert state(network, acc) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 30])
def test_killed_while_two_processes_save_to_one_path(kills):
    """Each goes on from a whole file of one of the two, at least as new as was said, and nothing is left beside it."""
    rng, (network, acc, _) = random.Random(kills), build(hidden=300)
    # Not all of sys.path: level O1 of MindSpore's amp adds folders that hide modules of Python.
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path.strip(os.pathsep)}
    for _ in range(kills):
        command = [sys.executable, __file__, "c.safetensors", "100000"]
        processes = [subprocess.Popen(command, text=True, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
        said = [process.stdout.readline() for process in processes]
        time.sleep(rng.uniform(0, 0.2))
        assert [process.poll() for process in processes] == [None, None]
        for process in processes:
            process.send_signal(signal.SIGKILL)
        said = [int((first + process.communicate()[0]).split()[-1]) for first, process in zip(said, processes)]
        position = load_checkpoint("c.safetensors", network, acc)
        assert position in {number + more for number in said for more in (0, 1)}
    last = position + 5
    assert run("c.safetensors", last) == run("uninterrupted.safetensors", last)
    assert sorted(os.listdir()) == ["c.safetensors", "uninterrupted.safetensors"]


def test_every_entry_matters():
    """Control of the tests above: without one entry, training does not go on bit-identically."""
    network, acc, train_step = build()
    train(train_step, 0, 5)
    save_checkpoint("c.safetensors", network, acc)
    train(train_step, 5, 11)
    uninterrupted = state(network, acc)
    network, acc, train_step = build()
    network.first.weight.set_data(network.first.weight * 2)
    entries = [acc.state["sum.first.weight"], acc.mini_step, acc.weight_sum, acc.optimizer.global_step,
               acc.optimizer.moments[0], network.first.weight]
    fresh = [Tensor(entry.asnumpy().copy()) for entry in entries]
    for i in range(len(entries) + 1):
        load_checkpoint("c.safetensors", network, acc)
        for entry, value in [*zip(entries, fresh)][i:i + 1]:
            ms.ops.assign(entry, value)
        train(train_step, 5, 11)
        assert (state(network, acc) == uninterrupted) == (i == len(entries))


def test_a_closed_window_goes_on_with_another_accumulate_step():
    """From and to a number and a schedule: bit-identical to one schedule for all. Control: the same length again."""
    network, acc, train_step = build(accumulate_step={0: 3, 2: 2})
    train(train_step, 0, 11)
    uninterrupted = values(network.get_parameters())
    for saved in (3, {0: 3, 2: 5}):
        network, acc, train_step = build(accumulate_step=saved)
        train(train_step, 0, 6)
        save_checkpoint("c.safetensors", network, train_step)
        for length, same in ((2, True), ({0: 5, 2: 2}, True), (3, False)):
            network, acc, train_step = build(accumulate_step=length)
            train(train_step, 0, 1)  # this open window is dropped
            load_checkpoint("c.safetensors", network, train_step)
            assert (acc.status().mini_step, acc.status().needed) == (0, 2 if same else 3)
            train(train_step, 6, 11)
            assert (difference(values(network.get_parameters()), uninterrupted) == 0) == same


@pytest.mark.parametrize("make", [
    lambda network, *settings: make_train_step(mean_loss(network), *settings),
    lambda network, *settings: TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), *settings)])
def test_a_full_window_that_an_interrupt_left_open_is_closed_by_the_next_call(make):
    def made():
        network = MLP()
        return network, make(network, OPTIMIZERS["Momentum"](network.trainable_params()), 3)

    network, train_step = made()
    grad_fn = ms.value_and_grad(mean_loss(network), None, train_step.accumulator.weights)
    for x, y in BATCHES[:3]:  # as far as the interrupted call came
        train_step.accumulator.add(grad_fn(*tensors(x, y))[1], 4)
    save_checkpoint("c.safetensors", network, train_step)
    network, train_step = made()
    train(train_step, 0, 1)
    load_checkpoint("c.safetensors", network, train_step)
    train(train_step, 3, 4)
    acc = train_step.accumulator
    assert (int(acc.update_step), int(acc.mini_step), float(acc.window_weight)) == (1, 1, 12)


def refused(path, message, network, acc):
    """That a file is refused, and nothing of it is loaded. Return the message."""
    before = state(network, acc)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path, network, acc)
    assert state(network, acc) == before
    return str(caught.value)


def test_another_run_is_refused():
    """Control: the same run is not. A loss scale has to be one that gradients can be divided by."""
    network, acc, train_step = build()
    train(train_step, 0, 5)
    save_checkpoint("c.safetensors", network, acc)
    scaled = build(scaler=True)[:2]
    save_checkpoint("scaled.safetensors", *scaled)
    scale = r"accumulator:loss_scaler\.scale_value"
    for other, message in (
            ({"accumulate_step": 4}, r"in an open window with accumulate_step 3, but this run has 4; load it with the "
                                     r"old settings, train to the end of the window or call flush\(\), save, and"),
            ({"reduction": "sum"}, "in an open window with reduction mean, but this run has sum; load it with the old"),
            ({"on_nonfinite": "skip_window"}, "in an open window with on_nonfinite apply, but this run has skip_wi"),
            ({"hidden": 6}, r"first\.weight is of float32 \(5, 6\) in the file, but of float32 \(6, 6\) in this run"),
            ({"buffer_dtype": ms.float16}, r"in an open window with buffer_dtype Float32, but this run has Float16"),
            ({"optimizer": "Adam"}, r"optimizer:\S+ is missing in the file, but of .* in this run; build netw"),
            ({"scaler": True}, r"with loss_scaler None, but this run has DynamicLossScaler\(scale_value=1024\.0, ")):
        refused("c.safetensors", message, *build(**other)[:2])
    load_checkpoint("scaled.safetensors", *build(scaler=True)[:2])
    for value in (np.nan, np.inf, 0, -2):
        scaled[1].loss_scaler.scale_value.set_data(Tensor(value, ms.float32))
        save_checkpoint("scaled.safetensors", *scaled)
        message = rf"in {scale}, the loss scale is .*, expected one finite number"
        refused("scaled.safetensors", message, *build(scaler=True)[:2])


def test_damaged_files_are_refused():
    """Truncated anywhere, or one bit flipped anywhere; control: the whole file. For forged ones see test_file.py."""
    network, acc, _ = build()
    path = Path("c.safetensors")
    save_checkpoint(path, network, acc)
    whole = path.read_bytes()
    damaged = [whole[:n] for n in (0, 1, 100, len(whole) // 2, len(whole) - 1)]
    start = 8 + int.from_bytes(whole[:8], "little")  # of the data
    rng = random.Random(0)
    for bit in (*range(64), *rng.sample(range(64, 8 * start), 100), *rng.sample(range(8 * start, 8 * len(whole)), 40)):
        damaged.append(whole[:bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1:])
    said = set()
    for data in damaged:
        path.write_bytes(data)
        said.add(refused(path, r"c\.safetensors is (truncated, damaged or not in|damaged \(SHA-256 mismatch\)|"
                               "not a checkpoint of ms_accum; give a file that save_checkpoint wrote)", network, acc))
    assert len(said) > 2, "the header, the description and the entries"
    path.write_bytes(whole)
    load_checkpoint(path, network, acc)


def test_files_of_mindspore_are_refused_with_the_way_to_load_weights():
    """In both formats; the way that the message gives works. Controls: files that are neither."""
    network, acc, _ = build()
    values_of = values(network.trainable_params())
    ms.save_checkpoint(network, "c.ckpt")
    ms.save_checkpoint(network, "foreign.safetensors", format="safetensors")
    for path in ("c.ckpt", "foreign.safetensors"):
        other, its, _ = build()
        ms.ops.assign(other.first.weight, other.first.weight * 2)
        assert difference(values(other.trainable_params()), values_of) > 0
        message = refused(path, "was written by mindspore.save_checkpoint or by an older ms_accum, so no training can "
                                "resume from it; load its weights alone: ms_accum", other, its)
        eval(re.search("alone: (.*)$", message)[1], {"ms_accum": ms_accum, "network": other, "path": path})
        assert difference(values(other.trainable_params()), values_of) == 0
    save_file({"a": np.zeros(1)}, "other.safetensors")
    refused("other.safetensors", r"other\.safetensors is not a checkpoint of ms_accum; give a file", network, acc)
    Path("text.safetensors").write_text("not a checkpoint at all")
    refused("text.safetensors", r"text\.safetensors is truncated, damaged or not in the format saf", network, acc)
    for call, path in ((save_checkpoint, "c.ckpt"), (save_checkpoint, "new.ckpt"), (load_checkpoint, "new.ckpt")):
        message = rf"{path} ends in '\.ckpt', expected '\.safetensors'; .*; name the file {path[:-5]}\.safetensors$"
        with pytest.raises(ValueError, match=message):
            call(path, network, acc)
    assert sorted(os.listdir()) == ["c.ckpt", "foreign.safetensors", "other.safetensors", "text.safetensors"]


def test_bad_arguments_are_refused():
    network, acc, _ = build()

    def function(grads):
        return True

    function.parameters = tuple(network.trainable_params())
    renamed = {name: MLP() for name in ("ms_accum", "ms_accum.sha256", "__metadata__", "rank1:a")}
    for name, other in renamed.items():
        other.first.bias.name = name
    both = save_checkpoint, load_checkpoint
    for error, message, call, *arguments in (
            *((TypeError, r"accumulator is of type \w+, expected an", call, network, acc.optimizer) for call in both),
            *((TypeError, r"network is of type Accumulator, expected a mind", call, acc, network) for call in both),
            (FileNotFoundError, r"^there is no checkpoint \S+c\.safetensors; give a file that save_checkpoint .*wrote",
             load_checkpoint, network, acc),
            (TypeError, "the optimizer is of type function, exp", save_checkpoint, network,
             Accumulator(function, 2, reduction="sum")),
            *((ValueError, f"two entries of the checkpoint would be called {name}; rename", save_checkpoint, other, acc)
              for name, other in renamed.items())):
        with pytest.raises(error, match=message):
            call("c.safetensors", *arguments)
    for call in both:  # MindSpore's order, and its number of arguments
        for arguments, message in (
                ((network, "c"), r"^path is of type MLP, .*; give {}\(path, network, train_step\), with the path"),
                ((network, "c", acc), r"^path is of type MLP, expected a str or a path; give {}\(path, network, "),
                ((acc, "c"), "^path is of type Accumulator, expected a str or a path"),
                (("c", network), r"^{} got no accumulator; give {}\(path, network, train_step\), or give only "
                                 r"the network to mindspore\.{}"),
                (("c",), "^{} got no network and no accumulator"), ((), "^{} got no path and no network and no ")):
            with pytest.raises(TypeError, match=message.replace("{}", call.__name__)):
                call(*arguments)
    for error, message, call, path in (
            (ValueError, r"c\.npz ends in '\.npz', expected '\.safetensors'; checkpoints", save_checkpoint, "c.npz"),
            (ValueError, r"c ends in '', expected '\.safetensors'.*; name the file c\.safet", load_checkpoint, "c"),
            (FileNotFoundError, "nowhere does not exist; make it first", save_checkpoint, "nowhere/c.safetensors")):
        with pytest.raises(error, match=message):
            call(path, network, acc)
    for extra in ({1: 2}, (1, 2), np.float32(1), {"a": {1, 2}}, object()):
        with pytest.raises(TypeError, match=r"extra cannot be written as JSON \(.+\); give dicts with str as keys"):
            save_checkpoint("c.safetensors", network, acc, extra=extra)
    with pytest.raises(OSError, match=r"c\.safetensors cannot be written \(.*header too large"):
        save_checkpoint("c.safetensors", network, acc, extra="x" * 10**8)
    assert os.listdir() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
def test_a_file_is_on_the_disk_before_it_has_its_name(monkeypatch):
    """Whole and flushed, then renamed, then the folder. A link stays one; MindSpore reads the network's weights."""
    done, path = [], Path("elsewhere", "c.safetensors").resolve()
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(("fsync", path.name, path.read_bytes() if path.is_file() else None))
        fsync(descriptor)

    def seen_replace(part, path):
        assert Path(part).parent.name.startswith(".c.part-")
        done.append(("rename", Path(part).name, Path(path).name))
        replace(part, path)

    path.parent.mkdir()
    Path("link.safetensors").symlink_to(path)
    network, acc, _ = build()
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    umask = os.umask(0o027)
    try:
        save_checkpoint("link.safetensors", network, acc)
    finally:
        os.umask(umask)
    whole = path.read_bytes()
    assert done == [("fsync", path.name, whole), ("rename", path.name, path.name), ("fsync", "elsewhere", None)]
    assert os.listdir("elsewhere") == [path.name]
    assert Path("link.safetensors").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    other = MLP(seed=7)
    assert ms.load_param_into_net(other, ms.load_checkpoint(str(path), format="safetensors"))[0] == []
    assert difference(values(other.trainable_params()), values(network.trainable_params())) == 0


PRINTING = """
import sys
from mindspore import nn
from ms_accum import Accumulator, load_checkpoint, save_checkpoint
network = nn.Dense(2, 1)
accumulator = Accumulator(nn.SGD(network.trainable_params()), 2, reduction="sum")
save_checkpoint("c.safetensors", network, accumulator)
print("loading", file=sys.stderr, flush=True)
load_checkpoint("c.safetensors", network, accumulator)
print("loaded", file=sys.stderr, flush=True)
import mindspore
mindspore.log.warning("seen")
"""


@pytest.mark.slow
def test_a_load_prints_nothing():
    """No warning and no error of MindSpore either. Control: what it logs is seen."""
    environment = {name: value for name, value in os.environ.items() if name != "GLOG_v"}
    said = subprocess.run([sys.executable, "-c", PRINTING], env=environment, capture_output=True, text=True, check=True)
    assert "\nloading\nloaded\n" in f"\n{said.stderr}"
    assert "seen" in said.stderr.partition("loaded")[2]


@pytest.mark.parametrize("state_of_run", [pytest.param("open", marks=pytest.mark.slow), "interrupted"])
def test_a_load_that_is_interrupted_anywhere_leaves_no_run_that_trains(state_of_run, monkeypatch):
    """At each assignment, in a run with an open window, or after a first load that was interrupted: the next call
    trains as if nothing had happened (no value has changed yet) or raises an error. Control: a whole load heals it.
    """
    assign, left = ops.assign, [-1]

    def interrupted(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return assign(*arguments)

    network, acc, train_step = build()
    train(train_step, 0, 5)
    save_checkpoint("c.safetensors", network, acc)
    saved, refused_calls = state(network, acc), 0
    monkeypatch.setattr(ops, "assign", interrupted)
    for at in range(1, 60):
        load_checkpoint("c.safetensors", network, acc)
        acc.reset()
        train(train_step, 6, 8)  # an open window
        if state_of_run == "interrupted":
            left[0] = 20
            with pytest.raises(KeyboardInterrupt):
                load_checkpoint("c.safetensors", network, acc)
        before, left[0] = state(network, acc), at
        try:
            load_checkpoint("c.safetensors", network, acc)
            break  # it needs fewer assignments
        except KeyboardInterrupt:
            pass
        finally:
            left[0] = -1
        if state(network, acc) != before or state_of_run == "interrupted":
            refused_calls += 1
            with pytest.raises(RuntimeError, match="an error or an interrupt stopped an update"):
                train(train_step, 8, 9)
    assert refused_calls > 20
    load_checkpoint("c.safetensors", network, acc)
    assert state(network, acc) == saved


def test_a_file_that_is_written_while_it_is_checked_or_is_no_file_is_an_error(monkeypatch):
    """Controls: before it is written, and after."""
    network, acc, _ = build()
    path = Path("c.safetensors")
    save_checkpoint(path, network, acc)
    load_checkpoint(path, network, acc)

    def written(*arguments, **named):
        opened = safe_open(*arguments, **named)
        time.sleep(0.02)  # the clock of the file system
        with path.open("r+b") as other:
            other.write(path.read_bytes()[:1])
        return opened

    with monkeypatch.context() as patch:
        patch.setattr("ms_accum.checkpoint.file.safe_open", written)
        refused(path, "it was written while it was read", network, acc)
    load_checkpoint(path, network, acc)
    Path("folder.safetensors").mkdir()
    refused("folder.safetensors", r"folder\.safetensors is not a file; give a file that save_checkpoint wrote", network,
            acc)


def test_a_folder_that_cannot_be_flushed_is_a_warning(monkeypatch):
    """As on some network file systems: the file has its name by then. Control: that of a file is an error."""
    network, acc, _ = build()
    fsync = os.fsync

    def refusing(kind):
        def refuse(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (kind == "folder"):
                raise OSError(22, "Invalid argument")
            fsync(descriptor)
        return refuse

    save_checkpoint("c.safetensors", network, acc, extra="old")
    monkeypatch.setattr(os, "fsync", refusing("file"))
    with pytest.raises(OSError, match=r"c\.safetensors cannot be written"):
        save_checkpoint("c.safetensors", network, acc, extra="new")
    assert load_checkpoint("c.safetensors", network, acc) == "old"
    monkeypatch.setattr(os, "fsync", refusing("folder"))
    with pytest.warns(UserWarning, match="is saved, but its folder cannot be flushed to the disk .*Invalid argument"):
        save_checkpoint("c.safetensors", network, acc, extra="new")
    assert load_checkpoint("c.safetensors", network, acc) == "new"


def test_parameters_without_elements_and_complex_ones_come_back():
    made = []
    for scale in (1, 0):
        network, acc, _ = build()
        network.empty = ms.Parameter(Tensor(np.zeros((0, 3), np.float32)), name="empty", requires_grad=False)
        network.turn = ms.Parameter(Tensor(np.array([1 + 2j, 3]) * scale, ms.complex64), name="turn",
                                    requires_grad=False)
        made.append((network, acc))
    save_checkpoint("c.safetensors", *made[0])
    load_checkpoint("c.safetensors", *made[1])
    assert made[1][0].turn.asnumpy().tolist() == [1 + 2j, 3]
    other = build()  # control: it has no such parameters
    refused("c.safetensors", r"(turn is of complex64 \(2,\)|empty is of float32 \(0, 3\)) in the file, but missing",
            *other[:2])
    without = build()[:2]
    save_checkpoint("d.safetensors", *without)
    refused("d.safetensors", "(turn|empty) is missing in the file", *made[1])


def test_a_full_disk_leaves_the_old_file():
    """No file can grow beyond a limit, as on a full disk."""
    network, acc, _ = build(hidden=3000)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = Path("c.safetensors")
    save_checkpoint(path, network, acc, extra="old")
    old = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"{path} cannot be written"):
            save_checkpoint(path, network, acc, extra="new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == old
    signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir() == ["c.safetensors"]


def test_a_save_removes_only_its_own_rests(tmp_path):
    """Nothing of a living process, of another host or path; also if the name looks like a pattern."""
    path = tmp_path / "g[1].safetensors"
    with part_of(path) as part:
        start = part.parent.name.split(f"{os.getpid()}-")[0]
    dead = 2**22 + 1  # more than any process has
    gone = [f"{start}{dead}-01234567"]
    kept = [f"{start}{os.getpid()}-01234567", f"{start}1-01234567", "g[1].copy.safetensors",
            f".g[1].part-{'0' * 8}-{dead}-01234567", f".d{start[2:]}{dead}-01234567", f"{start}abc-def",
            f"{start}{'9' * 23}-01234567"]
    for name in gone + kept:
        file = tmp_path / name if name.endswith(".safetensors") else tmp_path / name / "g[1].tmp"
        file.parent.mkdir(exist_ok=True)
        file.touch()
    save_checkpoint(path, *build()[:2])
    assert sorted(os.listdir()) == sorted([path.name, *kept])


if __name__ == "__main__":  # what is killed: `python test_checkpoint.py PATH MICROBATCHES`
    run(sys.argv[1], int(sys.argv[2]))
