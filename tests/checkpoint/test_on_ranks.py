"""Files of two ranks: `test_on_ranks.py FOLDER` is what each of them does, started by msrun."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
from mindspore import nn
from mindspore.communication import get_rank, init
from support.launch import msrun
from support.modes import recorded_warnings
from support.protocols import KINDS
from support.training import masked_batches, masked_step, train_epochs

from ms_accum import DataParallel, load_checkpoint, save_checkpoint, shard_parameters
from ms_accum.selftest.networks import MLP

pytestmark = pytest.mark.slow


def data(rank):
    """Seven batches on rank 0, five on rank 1, of other sizes."""
    return masked_batches(((8, 8, 4, 8, 4, 8, 8), (6, 4, 6, 6, 4))[rank], seed=rank)


def build(options=None):
    network = MLP()
    weights = network.trainable_params()
    reducer = None if options is None else DataParallel(**options)
    parameters = shard_parameters(weights) if options and "zero" in options else weights
    return network, masked_step(network, nn.Adam(parameters, 0.01), 2, clip_norm=0.2, reducer=reducer, eager=True)


def state(network, step):
    """All but the count of this rank's own microbatches, which is in the place."""
    held = (*network.get_parameters(), *step.boundary.rates.state.values(), step.boundary.window.seen)
    return [p.asnumpy().tobytes() for p in held], step.status()[:9]


def said_by(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def resumed(kind, rank, folder):
    """How many files there are, how often a save warned, and the files whose run does not end as the unbroken one."""
    (network, step), files, warned = build(KINDS[kind]), [], 0

    def save(name):
        files.append(str(folder / f"{kind}.{name}.safetensors"))
        with recorded_warnings() as caught:
            save_checkpoint(files[-1], network, step, extra={"rank": rank})
        return sum("trained again" in str(w.message) for w in caught)

    step.on_update(lambda step: save(step.update_step))
    for epoch in range(2):
        for number, _ in enumerate(step.epoch(data(rank))):
            if number < 4:
                warned += save(f"{epoch}.{number}")
    end, other, wrong = state(network, step), build(KINDS[kind]), []
    for path in files:
        extra = load_checkpoint(path, *other)
        train_epochs(other[1], data(rank))
        if extra != {"rank": 0} or state(*other) != end:
            wrong.append(path)
    return [len(files), warned, wrong]


def errors(rank, folder):
    """What a rank says of a call that fails on one of them."""
    network, step = build(KINDS["window"])
    path = folder / "errors.safetensors"
    save_checkpoint(path, network, step)
    found = {"extra": said_by(save_checkpoint, path, network, step, extra=(1,) if rank else [1]),
             "folder": said_by(save_checkpoint, folder / "nowhere" / path.name, network, step),
             "network": said_by(load_checkpoint, path, nn.SequentialCell(network) if rank else network, step)}
    if rank == 0:
        path.write_bytes(path.read_bytes()[:-1])
    found["cut"] = said_by(load_checkpoint, path, network, step)
    found["missing"] = said_by(load_checkpoint, folder / "missing.safetensors", network, step)
    found["path"] = said_by(save_checkpoint, folder / f"rank{rank}.safetensors", network, step)
    return found


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command, environment = msrun(folder, 2, str(Path(__file__)))
    environment["MS_CPU_COMM_OP_TIMEOUT"] = "300"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = [folder / f"rank{rank}.json" for rank in (0, 1)]
    assert all(path.exists() for path in found), done.stdout[-3000:]
    return folder, [json.loads(path.read_text(encoding="utf-8")) for path in found]


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_runs_are_resumed_bit_for_bit_on_each_rank(left, kind):
    """Saved after four microbatches of two epochs, and in each update; half of the first are in an open window."""
    for of_rank in left[1]:
        assert of_rank[kind] == [8 + 8, 4, []]


def test_an_error_on_one_rank_is_one_on_both(left):
    expected = {
        "extra": ("RuntimeError: rank 1 failed", "TypeError: extra cannot be written as JSON"),
        "folder": ("FileNotFoundError: the folder", "OSError: rank 0 failed"),
        "network": ("CheckpointError: rank 1 failed", "CheckpointError: .*is missing in"),
        "cut": ("CheckpointError: .*damaged", "CheckpointError: rank 0 failed"),
        "missing": ("FileNotFoundError: there is no", "CheckpointError: rank 0 failed"),
        "path": ("RanksDiffer: rank 1 and rank 0 differ in path", "RanksDiffer: rank 1 and rank 0 differ in path")}
    for rank, of_rank in enumerate(left[1]):
        for name, said in of_rank["errors"].items():
            first, _, last = expected[name][rank].partition(".*")
            assert said.startswith(first), said
            assert last in said


def test_one_device_takes_the_file_and_says_what_its_place_counts(left):
    """Slices were joined. Control: one that was saved between two epochs is taken without a word."""
    for kind in KINDS:
        network, step = build()
        load_checkpoint(left[0] / f"{kind}.0.2.safetensors", network, step)
        assert (step.trained, step.update_step) == (2, 1)
        with pytest.raises(RuntimeError, match=r"another number of ranks.* \(2\) counts rank 0"):
            next(step.epoch(data(0)))
        list(step.epoch(data(0)[2:], skip=0))


def main(folder):
    init()
    rank, folder = get_rank(), Path(folder)
    found = {kind: resumed(kind, rank, folder) for kind in KINDS}
    found["errors"] = errors(rank, folder)
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
