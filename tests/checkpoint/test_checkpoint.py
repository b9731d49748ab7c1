"""The calls save_checkpoint, load_checkpoint and load_weights: arguments, files that are replaced, by hand, weights."""
import os
import re
import resource
import signal
import stat
import subprocess
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from safetensors.numpy import save_file
from support.modes import recorded_warnings

from ms_accum import Accumulator, CheckpointError, load_checkpoint, load_weights, make_train_step, save_checkpoint
from ms_accum.checkpoint.file import part_of
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

PATH = "c.safetensors"
BATCHES = [tensors(*batch) for batch in batches([4, 6, 4, 4, 6, 6])]


def build():
    network = MLP()
    return network, make_train_step(mean_loss(network), nn.Adam(network.trainable_params(), 0.01), 3, eager=True)


def weights(network):
    return [p.asnumpy().tobytes() for p in network.get_parameters()]


def test_an_accumulator_has_no_place_for_an_open_window():
    """Control: a closed one is saved. That it goes on: test_differential.py."""
    network = MLP()
    accumulator = Accumulator(nn.SGD(network.trainable_params(), 0.1), 2, reduction="mean")
    accumulator(accumulator.weights, 1.0)
    with pytest.raises(RuntimeError, match="1 microbatch of the open window would be lost: an Accumulator by hand has"):
        save_checkpoint(PATH, network, accumulator)
    assert not os.path.exists(PATH)
    accumulator(accumulator.weights, 1.0)
    with recorded_warnings() as caught:
        save_checkpoint(PATH, network, accumulator, extra={"at": 2})
    assert not caught
    accumulator(accumulator.weights, 1.0)  # a window that is open is dropped
    assert load_checkpoint(PATH, network, accumulator) == {"at": 2}
    assert accumulator.status()[:3] == (1, 0, 1)


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
    extra = {"epoch": 3, "position": [1, 2.5, None], "seed": "x", "nan": float("inf"), "true": True}
    save_checkpoint(PATH, network, step, extra=extra)
    assert load_checkpoint(PATH, network, step) == extra


# --- files ------------------------------------------------------------------------------------------------------------

def test_files_of_others_name_the_way_to_their_weights(monkeypatch):
    """Of MindSpore, of ms_accum 0.3, and of anybody: none trains on; the weights of the first two are loaded."""
    network, step = build()
    with monkeypatch.context() as patch:
        patch.setattr("ms_accum.checkpoint.file.VERSION", 6)
        save_checkpoint("old.safetensors", network, step)
    ms.save_checkpoint(network, "ms.ckpt")
    ms.save_checkpoint(network, "ms.safetensors", format="safetensors")
    for path in ("old.safetensors", "ms.ckpt", "ms.safetensors"):
        with pytest.raises(ValueError, match=r"weights.* alone: ms_accum.load_weights\(path, network\)"):
            load_checkpoint(path, network, step)
        other = MLP(seed=1)
        assert weights(other) != weights(network)
        load_weights(path, other)
        assert weights(other) == weights(network)
    save_file({"a": np.ones(2)}, PATH, {})
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


# --- weights ----------------------------------------------------------------------------------------------------------

def test_weights_are_loaded_into_a_step_that_has_begun():
    """From each kind of source, into its memory, of the network or a part of it. A file of ours names them by the
    structure. Control: load_param_into_net gives new memory."""
    trained, (network, step) = MLP(seed=1), build()
    own = make_train_step(mean_loss(trained), nn.SGD(trained.trainable_params(), 0.1), 1, eager=True)
    save_checkpoint(PATH, trained, own)
    ms.save_checkpoint(trained, "w.ckpt")
    for batch in BATCHES[:3]:
        step(*batch)
    before = {name: p.copy() for name, p in network.parameters_and_names()}
    for source in (PATH, "w.ckpt", {p.name: p.copy() for p in trained.get_parameters()}):
        load_weights(before, network)
        load_weights(source, network.second)
        assert weights(network.second) == weights(trained.second)
        assert weights(network.first) != weights(trained.first)
        load_weights(source, network)
        assert weights(network) == weights(trained)
    for i, parameter in enumerate(network.get_parameters()):
        parameter.name = f"renamed{i}"
    ops.assign(network.first.bias, network.first.bias + 1)
    load_weights(PATH, network)
    assert weights(network) == weights(trained)
    step.flush()
    step.boundary.require_unchanged()
    ms.load_param_into_net(network, {f"renamed{i}": p for i, p in enumerate(before.values())})
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
