"""save_checkpoint and load_checkpoint: bit-identical resume in a fresh process, atomic files, refusals."""
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from conftest import MLP, batches, run_python, values
from mindspore import Tensor, amp, nn

from ms_accum import Accumulator, DataParallel, load_checkpoint, make_train_step, save_checkpoint
from ms_accum import checkpoint as checkpoint_module
from ms_accum.checkpoint import CheckpointError

LOSS = nn.CrossEntropyLoss()


def build(optimizer="Momentum", dtype=ms.float32, reduction="mean", hidden=5, accumulate_step=3, scaler=False, strategy="fused", **options):
    """A network, its accumulator and a train step `(x, y) -> loss`, of which those of a sum are driven by hand."""
    network = MLP(hidden=hidden)
    network.to_float(dtype)
    if dtype != ms.float32:
        for parameter in network.trainable_params():
            parameter.set_dtype(dtype)
    parameters = network.trainable_params()
    made = {"Momentum": lambda: nn.Momentum(parameters, nn.exponential_decay_lr(0.1, 0.9, 100, 1, 1), 0.9),
            "Adam": lambda: nn.Adam(parameters, 0.01), "SGD": lambda: nn.SGD(parameters, 0.1)}[optimizer]()
    acc = Accumulator(made, accumulate_step, 0.5, reduction=reduction, **options)

    def forward_fn(x, y):
        return LOSS(network(x).astype(ms.float32), y)

    if reduction == "mean":
        loss_scaler = amp.DynamicLossScaler(1024, 2, 2) if scaler else None
        return network, acc, make_train_step(forward_fn, acc, strategy=strategy, loss_scaler=loss_scaler)
    grad_fn = ms.value_and_grad(forward_fn, None, acc.optimizer.parameters)

    @ms.jit
    def train_step(x, y):
        loss, grads = grad_fn(x, y)
        return loss, acc(grads)

    return network, acc, train_step


def train(train_step, first, last):
    """Microbatches `first` to `last` of a fixed sequence, of which the fourth holds a NaN."""
    for i, (x, y) in enumerate(batches([4] * 12)[first:last], first):
        if i == 3:
            x[0, 0] = np.nan if train_step_survives(train_step) else x[0, 0]
        train_step(Tensor(x, ms.float32), Tensor(y, ms.int32))


def train_step_survives(train_step):
    return getattr(train_step, "accumulator", None) is not None and train_step.accumulator.on_nonfinite != "apply"


def state(network, acc):
    """Every bit of state by name."""
    return {name: p.asnumpy().tobytes() for name, p in checkpoint_module._entries(network, acc).items()}


CASES = {
    "fused": {},
    "split": {"strategy": "split", "optimizer": "Adam"},
    "sum": {"reduction": "sum"},
    "float16": {"dtype": ms.float16, "optimizer": "SGD"},
    "float16 buffers": {"buffer_dtype": ms.float16},
    "skip_microbatch": {"on_nonfinite": "skip_microbatch"},
    "skip_window": {"on_nonfinite": "skip_window", "optimizer": "Adam"},
    "loss scaler": {"scaler": True},
    "schedule": {"accumulate_step": {0: 2, 2: 3}},
    "one rank": {"reducer": DataParallel()},
}


# Op by op, every case in one of the two formats at least; to compile one takes 5 s.
COMPILED = {("fused", ".ckpt"), ("split", ".safetensors"), ("float16", ".safetensors"), ("skip_microbatch", ".ckpt"),
            ("loss scaler", ".ckpt")}


@pytest.mark.parametrize(("mode", "case", "suffix"), [
    *(("pynative", case, ".safetensors" if case in ("split", "float16") else ".ckpt") for case in CASES),
    *(pytest.param("jit", case, suffix, marks=[] if (case, suffix) in COMPILED else pytest.mark.slow)
      for case in CASES for suffix in (".ckpt", ".safetensors"))])
def test_training_goes_on_bit_identically(mode, case, suffix, tmp_path, monkeypatch):
    """Saved in mid-window after 5 of 11 microbatches; network and accumulator built anew with other weights."""
    if mode == "pynative":
        monkeypatch.setenv("MS_JIT", "0")
    network, acc, train_step = build(**CASES[case])
    train(train_step, 0, 5)
    assert int(acc.mini_step) > 0
    extra = {"epoch": 3, "position": [1, 2.5, None], "seed": "x", "nan": float("inf")}
    save_checkpoint(tmp_path / f"c{suffix}", network, acc, extra=extra)
    saved = state(network, acc)
    train(train_step, 5, 11)
    uninterrupted = state(network, acc)
    assert uninterrupted != saved

    network, acc, train_step = build(**CASES[case])
    train(train_step, 6, 9)  # whatever happened before is forgotten
    assert state(network, acc) != saved
    assert load_checkpoint(tmp_path / f"c{suffix}", network, acc) == extra
    assert state(network, acc) == saved
    train(train_step, 5, 11)
    assert state(network, acc) == uninterrupted


DROPOUT = """
import hashlib, sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
sys.path.insert(0, TESTS)
from conftest import MLP, avoid_busy_waiting, tensors
from ms_accum import Accumulator, load_checkpoint, make_train_step, save_checkpoint

ms.set_seed(1)
loss_fn = nn.CrossEntropyLoss()

def train(path, mask_given):
    network, dropout = MLP(hidden=16), nn.Dropout(p=0.5).set_train()
    def forward_fn(x, y, mask):
        hidden = ms.ops.tanh(network.first(x))
        return loss_fn(network.second(hidden * mask if mask_given else dropout(hidden)), y)
    acc = Accumulator(nn.SGD(network.trainable_params(), 0.1), 4, reduction="mean")
    train_step = make_train_step(forward_fn, acc)
    position = load_checkpoint(path, network, acc)["position"] if "resume" in sys.argv else 0
    for i in range(position, 8):
        rng = np.random.default_rng([1, i])
        batch = tensors(rng.normal(size=(4, 6)), rng.integers(0, 3, 4))
        train_step(*batch, Tensor(2.0 * (rng.random((4, 16)) < 0.5), ms.float32))
        if i == 5 and position == 0:
            save_checkpoint(path, network, acc, extra={"position": i + 1})
    return hashlib.sha256(b"".join(p.asnumpy().tobytes() for p in network.get_parameters())).hexdigest()

print(train("mask.ckpt", True), train("layer.ckpt", False))
"""


def test_what_a_random_layer_needs_to_go_on_bit_identically():
    """Its masks as an argument that follows from the position. Control: nn.Dropout, whose kernel keeps its state to itself."""
    script = f"TESTS = {str(Path(__file__).parent)!r}\n{DROPOUT}"
    mask, layer = run_python(script).split()
    resumed_mask, resumed_layer = run_python(script, "resume").split()
    assert resumed_mask == mask
    assert resumed_layer != layer


def test_mindspores_random_state_is_nothing_to_save():
    """It covers no kernel on CPU (MindSpore 2.10). If this fails one day, a checkpoint has to hold it."""
    dropout, x = nn.Dropout(p=0.5).set_train(), Tensor(np.ones((4, 64)), ms.float32)

    @ms.jit
    def compiled(x):
        return dropout(x)

    for function in (dropout, compiled, lambda x: ms.ops.rand(256), lambda x: ms.ops.dropout(x, 0.5, True)):
        before = ms.get_rng_state()
        first = function(x).asnumpy()
        assert np.array_equal(ms.get_rng_state().asnumpy(), before.asnumpy())
        ms.set_rng_state(before)
        assert not np.array_equal(function(x).asnumpy(), first)


@pytest.mark.parametrize("forgotten", ["accumulator:first.weight", "accumulator:mini_step", "accumulator:weight_sum",
                                       "optimizer:global_step", "optimizer:moments.first.weight", "first.weight"])
def test_every_entry_matters(forgotten, tmp_path, monkeypatch):
    """Control of the test above, op by op: a checkpoint without one entry does not go on bit-identically."""
    monkeypatch.setenv("MS_JIT", "0")
    entries = checkpoint_module._entries
    network, acc, train_step = build()
    train(train_step, 0, 5)
    assert forgotten in entries(network, acc)
    monkeypatch.setattr(checkpoint_module, "_entries", lambda *built: {k: v for k, v in entries(*built).items() if k != forgotten})
    save_checkpoint(tmp_path / "c.ckpt", network, acc)
    train(train_step, 5, 11)
    uninterrupted = values(network.trainable_params())
    network, acc, train_step = build()
    for parameter in network.trainable_params():
        parameter.set_data(parameter * 2)
    load_checkpoint(tmp_path / "c.ckpt", network, acc)
    train(train_step, 5, 11)
    assert any((a != b).any() for a, b in zip(values(network.trainable_params()), uninterrupted))


RESUME = """
import sys
import mindspore as ms, numpy as np
sys.path.insert(0, TESTS)
from test_checkpoint import build, train, state
from ms_accum import save_checkpoint, load_checkpoint
from hashlib import sha256
network, acc, train_step = build()
if sys.argv[1] == "resume":
    print(load_checkpoint("c.ckpt", network, acc))
    train(train_step, 5, 11)
else:
    train(train_step, 0, 5)
    save_checkpoint("c.ckpt", network, acc, extra=5)
    train(train_step, 5, 11)
print(sha256(b"".join(state(network, acc).values())).hexdigest())
"""


def test_in_a_fresh_process():
    script = f"TESTS = {str(Path(__file__).parent)!r}\n{RESUME}"
    stopped = run_python(script, "run").splitlines()
    assert run_python(script, "resume").splitlines() == ["5", *stopped]


def test_learning_rates_of_experimental_optimizers(tmp_path):
    """Which are Parameters, but not where a Cell keeps its own."""
    def build_experimental():
        network = MLP()
        return network, Accumulator(ms.experimental.optim.SGD(network.trainable_params(), lr=0.1), 2)

    network, acc = build_experimental()
    scheduler = ms.experimental.optim.lr_scheduler.StepLR(acc.optimizer, 1, 0.1)
    scheduler.step()
    scheduler.step()
    save_checkpoint(tmp_path / "c.ckpt", network, acc)
    network, acc = build_experimental()
    load_checkpoint(tmp_path / "c.ckpt", network, acc)
    assert float(acc.optimizer.param_groups[0]["lr"]) == pytest.approx(0.001)


def test_an_optimizer_whose_state_cannot_be_found_is_refused(tmp_path):
    network = MLP()

    def step(grads):
        return True

    step.parameters = tuple(network.trainable_params())
    with pytest.raises(TypeError, match=r"the optimizer is of type function, expected an nn.Cell, whose state can be found"):
        save_checkpoint(tmp_path / "c.ckpt", network, Accumulator(step, 2))


# --- the file -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_mindspore_reads_the_networks_weights(suffix, tmp_path):
    network, acc, _ = build()
    save_checkpoint(tmp_path / f"c{suffix}", network, acc)
    other = MLP(seed=7)
    missing, _ = ms.load_param_into_net(other, ms.load_checkpoint(str(tmp_path / f"c{suffix}"), format=suffix[1:]))
    assert missing == []
    assert all((a == b).all() for a, b in zip(values(other.trainable_params()), values(network.trainable_params())))


def test_links_modes_and_folders(tmp_path):
    """A link stays one; the file's mode is that of any other new file; a folder that is not there is named."""
    network, acc, _ = build()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "c.ckpt").symlink_to(tmp_path / "elsewhere" / "real.ckpt")
    umask = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "c.ckpt", network, acc)
    finally:
        os.umask(umask)
    assert (tmp_path / "c.ckpt").is_symlink()
    assert (tmp_path / "elsewhere" / "real.ckpt").stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist"):
        save_checkpoint(tmp_path / "nowhere" / "c.ckpt", network, acc)


def test_earlier_generations_of_a_rank_are_removed_and_nothing_else(tmp_path):
    """Also half-written ones, and if the name looks like a pattern."""
    path, new = tmp_path / "g[1].ckpt", "f" * 16
    mine = checkpoint_module._of_rank(path, 1, 2, new)
    old = [f"g[1].rank1of2-{'0' * 16}.ckpt", f".g[1].rank1of2-{'1' * 16}.part-0123abcd-4711-89abcdef.ckpt",
           f".g[1].rank1of2-{'1' * 16}.part-0123abcd-4711-89abcdef.tmp"]
    others = [mine.name, "g[1].ckpt", f"g[1].rank0of2-{new}.ckpt", f"g[1].rank1of4-{new}.ckpt", f"g1.rank1of2-{new}.ckpt",
              "g[1].rank1of2.ckpt"]
    for name in old + others:
        (tmp_path / name).touch()
    checkpoint_module._remove_generations(path, 1, 2, mine)
    assert sorted(os.listdir(tmp_path)) == sorted(others)


def test_nothing_is_left_beside_the_file(tmp_path):
    network, acc, _ = build()
    for _ in range(2):
        save_checkpoint(tmp_path / "c.ckpt", network, acc)
    assert [path.name for path in tmp_path.iterdir()] == ["c.ckpt"]


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_damaged_files_are_refused(suffix, tmp_path):
    """Truncated anywhere, one bit flipped anywhere: one clear error, nothing loaded."""
    network, acc, train_step = build()
    path = tmp_path / f"c{suffix}"
    save_checkpoint(path, network, acc)
    whole = path.read_bytes()
    train(train_step, 0, 2)
    before = state(network, acc)
    rng = random.Random(0)
    damaged = [whole[:n] for n in (0, 1, 100, len(whole) // 2, len(whole) - 1)]
    for _ in range(60):
        bit = rng.randrange(8 * len(whole))
        damaged.append(whole[:bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1:])
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"c\.\w+ is (truncated, or no checkpoint of ms_accum|damaged: its SHA-256)"):
            load_checkpoint(path, network, acc)
    assert state(network, acc) == before
    path.write_bytes(whole)
    load_checkpoint(path, network, acc)  # control


def test_foreign_files_are_refused(tmp_path):
    network, acc, _ = build()
    ms.save_checkpoint(network, str(tmp_path / "foreign.ckpt"))
    with pytest.raises(CheckpointError, match=r"foreign.ckpt is truncated, or no checkpoint of ms_accum; give a file that"):
        load_checkpoint(tmp_path / "foreign.ckpt", network, acc)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "missing.ckpt", network, acc)
    with pytest.raises(ValueError, match=r"ends in '.npz', expected one of .ckpt, .safetensors"):
        load_checkpoint(tmp_path / "other.npz", network, acc)
    with pytest.raises(ValueError, match=r"ends in '', expected one of"):
        save_checkpoint(tmp_path / "other", network, acc)


def test_a_made_up_file_executes_nothing(tmp_path):
    """A pickle under a right checksum is not opened as one."""
    import pickle
    from hashlib import sha256

    class Malice:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    network, acc, _ = build()
    data = checkpoint_module._BLANK + b'"}' + pickle.dumps(Malice())
    for suffix in (".ckpt", ".safetensors"):
        path = tmp_path / f"c{suffix}"
        path.write_bytes(data.replace(b"0" * 64, sha256(data).hexdigest().encode()))
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_checkpoint(path, network, acc)
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Malice()))  # control: it would have
    assert (tmp_path / "executed").exists()


def test_arguments_of_the_wrong_kind_are_refused(tmp_path):
    network, acc, _ = build()
    for function in (save_checkpoint, load_checkpoint):
        with pytest.raises(TypeError, match=r"acc is of type \w+, expected an Accumulator; give path, network"):
            function(tmp_path / "c.ckpt", network, acc.optimizer)
        with pytest.raises(TypeError, match=r"network is of type Accumulator, expected a mindspore\.nn\.Cell; give path, network"):
            function(tmp_path / "c.ckpt", acc, network)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("other", "message"), [
    ({"accumulate_step": 4}, r"was saved with accumulate_step 3, but this run has 4; build it alike"),
    ({"reduction": "sum"}, r"was saved with reduction mean, but this run has sum"),
    ({"on_nonfinite": "skip_window"}, r"was saved with on_nonfinite apply, but this run has skip_window"),
    ({"hidden": 6}, r"first.weight has shape \(5, 6\), but this run's has \(6, 6\)"),
    ({"optimizer": "Adam"}, r"has no entry optimizer:beta1_power, which this run needs|has no entry optimizer:"),
    ({"optimizer": "SGD"}, r"has the entry optimizer:moments.first.weight|has no entry optimizer:"),
    ({"buffer_dtype": ms.float16}, r"accumulator:first.weight is of Float32, but this run's of Float16"),
    ({"scaler": True}, r"has no entry accumulator:loss_scaler.scale_value, which this run needs"),
])
def test_another_run_is_refused_and_nothing_loaded(other, message, tmp_path, monkeypatch):
    monkeypatch.setenv("MS_JIT", "0")
    network, acc, _ = build()
    save_checkpoint(tmp_path / "c.ckpt", network, acc)
    network, acc, train_step = build(**other)
    train(train_step, 0, 2)
    before = state(network, acc)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "c.ckpt", network, acc)
    assert state(network, acc) == before


@pytest.mark.parametrize("scale", [np.nan, np.inf, 0, -2])
def test_a_loss_scale_that_nothing_can_be_divided_by_is_not_loaded(scale, tmp_path):
    network, acc, _ = build(scaler=True)
    before = state(network, acc)
    acc.loss_scaler.scale_value.set_data(Tensor(scale, ms.float32))
    save_checkpoint(tmp_path / "c.ckpt", network, acc)
    acc.loss_scaler.scale_value.set_data(Tensor(1024, ms.float32))
    with pytest.raises(CheckpointError, match=r"in accumulator:loss_scaler.scale_value, the loss scale is .*, expected one finite number"):
        load_checkpoint(tmp_path / "c.ckpt", network, acc)
    assert state(network, acc) == before


@pytest.mark.parametrize("extra", [{1: 2}, (1, 2), np.float32(1), {"a": {1, 2}}, object()])
def test_extra_that_would_change_is_refused(extra, tmp_path):
    network, acc, _ = build()
    with pytest.raises(TypeError, match="extra"):
        save_checkpoint(tmp_path / "c.ckpt", network, acc, extra=extra)
    assert list(tmp_path.glob("c*")) == []


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
    save_checkpoint(tmp_path / "c.ckpt", network, acc)
    part = done[0][1]
    assert part.startswith(".c.part-")
    assert done == [("fsync", part, (tmp_path / "c.ckpt").read_bytes()), ("rename", part, "c.ckpt"),
                    ("fsync", tmp_path.name, None)]


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, TESTS)
from test_checkpoint import build, save_checkpoint
network, acc, _ = build(hidden=3000)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))  # a file that grows further is refused, as on a full disk
try:
    save_checkpoint(sys.argv[1], network, acc, extra="new")
except OSError:
    print("OSError")
"""


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_a_full_disk_leaves_the_old_file(suffix, tmp_path):
    network, acc, _ = build()
    path = tmp_path / f"c{suffix}"
    save_checkpoint(path, network, acc, extra="old")
    old = path.read_bytes()
    assert run_python(f"TESTS = {str(Path(__file__).parent)!r}\n{FULL_DISK}", str(path)) == "OSError\n"
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.glob("*c.*")] == [path.name]


SAVING = """
import sys
sys.path.insert(0, TESTS)
from test_checkpoint import build, save_checkpoint
from ms_accum import load_checkpoint
network, acc, _ = build(hidden=2000)
i = 0
if len(sys.argv) > 2:
    i = load_checkpoint(sys.argv[1], network, acc)["i"]
    assert float(network.first.bias.asnumpy()[0]) == i, "parts of two checkpoints"
print("ready", i, flush=True)
while True:
    i += 1
    network.first.bias.set_data(network.first.bias * 0 + i)
    save_checkpoint(sys.argv[1], network, acc, extra={"i": i})
    print(i, flush=True)
"""


SAVING_AT_ONCE = """
import sys
sys.path.insert(0, TESTS)
from test_checkpoint import build, save_checkpoint
network, acc, _ = build(hidden=500)
print("ready", flush=True)
sys.stdin.readline()
for i in range(20):
    network.first.bias.set_data(network.first.bias * 0 + i + float(sys.argv[2]))
    save_checkpoint(sys.argv[1], network, acc, extra=[i, float(sys.argv[2])])
"""


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_two_processes_save_to_one_path(suffix, tmp_path):
    """None fails, and whoever reads finds one of their files, whole; in the end one of the last two."""
    script, path = tmp_path / "saving.py", tmp_path / f"c{suffix}"
    script.write_text(f"TESTS = {str(Path(__file__).parent)!r}\n{SAVING_AT_ONCE}", encoding="utf-8")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, script, path, who], **pipes) for who in ("100", "200")]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    network, acc, _ = build(hidden=500)
    while any(process.poll() is None for process in processes):
        if path.exists():
            saved = load_checkpoint(path, network, acc)
            assert float(network.first.bias.asnumpy()[0]) == sum(saved), "parts of two checkpoints"
    assert [(process.wait(), process.stderr.read()) for process in processes] == [(0, ""), (0, "")]
    assert load_checkpoint(path, network, acc) in ([19, 100], [19, 200])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, script.name])


def test_what_a_dead_process_left_is_removed_by_the_next_save(tmp_path):
    """And nothing of a living one, of another host or of another path."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    parts = checkpoint_module._parts_of(tmp_path / "c.ckpt")
    of_dead = [f"{parts}{dead.pid}-01234567{suffix}" for suffix in (".ckpt", ".tmp", ".safetensors")]
    others = [f"{parts}{os.getpid()}-01234567.ckpt", f"{parts}1-01234567.tmp",
              f".c.part-{'0' * 8}-{dead.pid}-01234567.ckpt", f".d{parts[2:]}{dead.pid}-01234567.ckpt"]
    for name in of_dead + others:
        (tmp_path / name).touch()
    network, acc, _ = build()
    save_checkpoint(tmp_path / "c.ckpt", network, acc)
    assert sorted(os.listdir(tmp_path)) == sorted(["c.ckpt", *others])


def kill_while_saving(path, kills, rng):
    """Kill a process that saves without end, `kills` times; each next one has to find a whole checkpoint, at least as new as was said."""
    script = path.with_name("saving.py")
    script.write_text(f"TESTS = {str(Path(__file__).parent)!r}\n{SAVING}", encoding="utf-8")
    said = 0
    for i in range(kills):
        process = subprocess.Popen([sys.executable, script, path, *(["resume"] if i else [])], stdout=subprocess.PIPE, text=True)
        ready = process.stdout.readline().split()
        assert ready[:1] == ["ready"], f"kill {i}: the checkpoint is not whole"
        assert said <= int(ready[1]) <= said + 1
        if i == 0:
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        lines = process.communicate()[0].split()
        said = int(lines[-1]) if lines else max(int(ready[1]), 1 if i == 0 else 0)


def test_killed_while_saving(tmp_path):
    kill_while_saving(tmp_path / "c.ckpt", 2, random.Random(0))
    network, acc, _ = build()
    save_checkpoint(tmp_path / "c.ckpt", network, acc)
    assert sorted(os.listdir(tmp_path)) == ["c.ckpt", "saving.py"]


@pytest.mark.slow
def test_killed_while_saving_at_fifty_moments(tmp_path):
    kill_while_saving(tmp_path / "c.ckpt", 50, random.Random(1))
