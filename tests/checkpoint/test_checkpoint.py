"""The calls save_checkpoint, load_checkpoint and load_weights: arguments, atomic files, kills, by hand, weights."""
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
from mindspore import Tensor, amp, nn
from safetensors import safe_open
from safetensors.numpy import save_file
from support.modes import recorded_warnings

import ms_accum
from ms_accum import Accumulator, CheckpointError, load_checkpoint, load_weights, make_train_step, save_checkpoint
from ms_accum.checkpoint.file import part_of
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

PATH = "c.safetensors"
BATCHES = [tensors(*batch) for batch in batches([4, 6, 4, 4, 6, 6])]


def build(hidden=5, **options):
    network = MLP(hidden=hidden)
    return network, make_train_step(mean_loss(network), nn.Adam(network.trainable_params(), 0.01), 3, eager=True,
                                    **options)


def by_hand(**options):
    network = MLP()
    accumulator = Accumulator(nn.Momentum(network.trainable_params(), 0.1, 0.9), 2, reduction="mean", **options)
    grad_fn = ms.value_and_grad(mean_loss(network), None, accumulator.weights)
    return network, accumulator, lambda batch: accumulator(grad_fn(*batch)[1], float(len(batch[0])))


def weights(network):
    return [p.asnumpy().tobytes() for p in network.get_parameters()]


# --- by hand ----------------------------------------------------------------------------------------------------------

def test_an_accumulator_has_no_place_for_an_open_window():
    """A closed one is saved and goes on. Control: other batches."""
    network, accumulator, train = by_hand(loss_scaler=amp.StaticLossScaler(8.0))
    train(BATCHES[0])
    with pytest.raises(RuntimeError, match="1 microbatch of the open window would be lost: an Accumulator by hand has"):
        save_checkpoint(PATH, network, accumulator)
    assert not os.path.exists(PATH)
    train(BATCHES[1])
    with recorded_warnings() as caught:
        save_checkpoint(PATH, network, accumulator, extra={"at": 2})
    assert not caught
    for batch in BATCHES[2:4]:
        train(batch)
    end = weights(network)
    other, accumulator, train = by_hand(loss_scaler=amp.StaticLossScaler(8.0))
    train(BATCHES[5])  # a window that is open is dropped
    for expected in (True, False):
        assert load_checkpoint(PATH, other, accumulator) == {"at": 2}
        assert accumulator.status()[:3] == (1, 0, 1)
        for batch in BATCHES[2:4] if expected else BATCHES[1:3]:
            train(batch)
        assert (weights(other) == end) == expected


# --- arguments --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((0, 1, 2), TypeError, r"path is of type int, expected a str or a path; give .*with the path first, unlike mindsp"),
    ((PATH, "network", 2), TypeError, "network is of type str, expected a mindspore.nn.Cell; give path, network"),
    ((PATH, 1, "step"), TypeError, "step is of type str, expected a train step, a TrainOneStepCell or an Accumulator"),
    (("c.ckpt", 1, 2), ValueError, r"c\.ckpt ends in '.ckpt', expected '.safetensors'; name the file c\.safet")])
def test_bad_arguments(arguments, error, message):
    network, step = build()
    given = tuple({1: network, 2: step}.get(value, value) for value in arguments)
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(error, match=message):
            call(*given)
    assert os.listdir() == []


def test_bad_extra_folders_and_paths():
    network, step = build()
    for extra in ((1, 2), {1: 2}, np.ones(1), {"a": {1}}):
        with pytest.raises(TypeError, match=r"extra cannot be written as JSON .*; give dicts with str as keys, lists"):
            save_checkpoint(PATH, network, step, extra=extra)
    with pytest.raises(FileNotFoundError, match=r"the folder .*missing does not exist; make it first"):
        save_checkpoint("missing/c.safetensors", network, step)
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*c\.safetensors; give a file that save"):
        load_checkpoint(PATH, network, step)
    os.mkdir(PATH)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load_checkpoint(PATH, network, step)
    os.rmdir(PATH)
    extra = {"epoch": 3, "position": [1, 2.5, None], "seed": "x", "nan": float("inf"), "true": True}
    save_checkpoint(PATH, network, step, extra=extra)
    assert load_checkpoint(PATH, network, step) == extra


# --- files ------------------------------------------------------------------------------------------------------------

def test_files_of_others_name_the_way_to_their_weights():
    """Of MindSpore, of ms_accum 0.3, and of anybody: none trains on; the weights of the first two are loaded."""
    network, step = build()
    save_checkpoint(PATH, network, step)
    with safe_open(PATH, "np") as file:
        entries, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["ms_accum"]
    text = about.replace('"version": 7', '"version": 6')
    digest = sha256(text.encode())
    for name in sorted(entries):
        digest.update(repr((name, entries[name].dtype.name, entries[name].shape)).encode() + entries[name].tobytes())
    save_file(entries, "old.safetensors", {"ms_accum": text, "ms_accum.sha256": digest.hexdigest()})
    ms.save_checkpoint(network, "ms.ckpt")
    ms.save_checkpoint(network, "ms.safetensors", format="safetensors")
    for path in ("old.safetensors", "ms.ckpt", "ms.safetensors"):
        with pytest.raises(ValueError, match=r"weights.* alone: ms_accum.load_weights\(path, network\)"):
            load_checkpoint(path, network, step)
        other = MLP(seed=1)
        assert weights(other) != weights(network)
        load_weights(path, other)
        assert weights(other) == weights(network)
    save_file(entries, PATH, {})
    for load in (lambda: load_checkpoint(PATH, network, step), lambda: load_weights(PATH, network)):
        with pytest.raises(CheckpointError, match="is not a checkpoint of ms_accum; give a file that save"):
            load()


def test_a_file_is_on_the_disk_before_it_has_its_name(monkeypatch):
    """File, name, folder. Readable by others as any file; a link is kept."""
    network, step = build()
    done, fsync, replace = [], os.fsync, os.replace

    def flushed(descriptor):
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(old, new):
        done.append("name")
        replace(old, new)

    monkeypatch.setattr("os.fsync", flushed)
    monkeypatch.setattr("os.replace", renamed)
    os.mkdir("elsewhere")
    os.symlink("elsewhere/d.safetensors", PATH)
    save_checkpoint(PATH, network, step)
    assert done == ["file", "name", "folder"]
    assert os.path.islink(PATH)
    assert os.listdir("elsewhere") == ["d.safetensors"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(os.stat(PATH).st_mode) == 0o666 & ~mask

    def fails(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError("Invalid argument")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.warns(UserWarning, match=r"is saved, but its folder cannot be flushed to the disk \(Inv"):
        save_checkpoint(PATH, network, step)


def test_a_full_disk_leaves_the_old_file():
    network, step = build()
    save_checkpoint(PATH, network, step, extra="old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"c\.safetensors cannot be written"):
            save_checkpoint(PATH, network, step, extra="new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir() == [PATH]
    assert load_checkpoint(PATH, network, step) == "old"


def test_a_save_removes_only_its_own_rests():
    """Folders of processes that live, of other hosts and of other files stay."""
    path = Path(PATH).resolve()
    with part_of(path) as part:
        folder, mine = part.parent.name, str(os.getpid())
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {folder: True, folder.replace(f"-{mine}-", f"-{dead.pid}-"): False,
             re.sub("part-[0-9a-f]{8}", "part-00000000", folder.replace(f"-{mine}-", f"-{dead.pid}-")): True,
             folder.replace(f"-{mine}-", f"-{dead.pid}-").replace(".c.", ".d."): True}
    for name in names:
        os.mkdir(name)
    save_checkpoint(PATH, *build())
    assert {name: os.path.exists(name) for name in names} == names


def run(path, last):
    """Train to microbatch `last`, saved and printed after each, from the file if there is one. Return a digest."""
    network, step = build(hidden=300)
    for i in range(load_checkpoint(path, network, step) if os.path.exists(path) else 0, last):
        for batch in BATCHES[:3]:
            step(*batch)
        save_checkpoint(path, network, step, extra=i + 1)
        print(i + 1, flush=True)
    return sha256(b"".join(weights(network))).hexdigest()


@pytest.mark.slow
def test_killed_while_two_processes_save_to_one_path():
    """Each goes on from a whole file of one of the two, at least as new as was said, and nothing is left beside it."""
    rng, (network, step) = random.Random(0), build(hidden=300)
    # Not all of sys.path: level O1 of MindSpore's amp adds folders that hide modules of Python.
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(ms_accum.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    for _ in range(10):
        command = [sys.executable, __file__, PATH, "100000"]
        processes = [subprocess.Popen(command, text=True, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
        said = [process.stdout.readline() for process in processes]
        time.sleep(rng.uniform(0, 0.2))
        assert [process.poll() for process in processes] == [None, None]
        for process in processes:
            process.send_signal(signal.SIGKILL)
        said = [int((first + process.communicate()[0]).split()[-1]) for first, process in zip(said, processes)]
        position = load_checkpoint(PATH, network, step)
        assert position in {number + more for number in said for more in (0, 1)}
    last = position + 5
    assert run(PATH, last) == run("uninterrupted.safetensors", last)
    assert sorted(os.listdir()) == [PATH, "uninterrupted.safetensors"]


# --- weights ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", ["file", "ckpt", "dict", "structure"])
def test_weights_are_loaded_into_a_step_that_has_begun(form):
    """Into its memory, of the network or a part of it. Control: load_param_into_net gives new memory."""
    trained, (network, step) = MLP(seed=1), build()
    own = make_train_step(mean_loss(trained), nn.SGD(trained.trainable_params(), 0.1), 1, eager=True)
    for batch in BATCHES[:3]:
        step(*batch)
    source = {"file": PATH, "structure": PATH, "ckpt": "w.ckpt", "dict": {
        p.name: p.copy() for p in trained.get_parameters()}}[form]
    if form in ("file", "structure"):
        save_checkpoint(PATH, trained, own)
    ms.save_checkpoint(trained, "w.ckpt")
    if form == "structure":
        for i, parameter in enumerate(network.get_parameters()):
            parameter.name = f"renamed{i}"
    else:
        load_weights(source, network.second)
        assert weights(network.second) == weights(trained.second)
        assert weights(network.first) != weights(trained.first)
    load_weights(source, network)
    assert weights(network) == weights(trained)
    step.flush()
    step.boundary.require_unchanged()
    ms.load_param_into_net(network, {name: p.copy() for name, p in network.parameters_and_names()})
    if form != "structure":
        with pytest.raises(RuntimeError, match="was given new memory"):
            step.flush()


def test_weights_that_do_not_fit():
    network, step = build()
    own = {p.name: p.copy() for p in network.get_parameters()}
    save_checkpoint(PATH, network, step)
    for source, error, message in [
            (1, TypeError, "source is of type int, expected a path or a dict of Tensors; give source, network"),
            ("missing.ckpt", FileNotFoundError, "there is no checkpoint missing.ckpt; give a file that ms_accum"),
            ({**own, "first.weight": 1}, TypeError, "first.weight is of type int, expected a Tensor"),
            ({**own, "first.weight": Tensor([1.0])}, ValueError, r"first.weight is of shape \(1,\) in source, exp"),
            ({"first.weight": own["first.weight"]}, ValueError, "first.bias is missing in source, expected shape")]:
        with pytest.raises(error, match=message):
            load_weights(source, network)
    with pytest.raises(ValueError, match=r"first.weight is of shape \(5, 6\) in c.safetensors, expected"):
        load_weights(PATH, MLP(hidden=4))
    Path("bad.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match=r"bad.ckpt is truncated or damaged, so MindSpore cannot read it"):
        load_weights("bad.ckpt", network)
    load_weights({**dict(network.parameters_and_names()), "first.bias": own["first.bias"]}, network)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
