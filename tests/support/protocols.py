"""Programs of ranks, drawn at random, legal or not: `protocols.py FOLDER FIRST COUNT [OPTION]`, started by
msrun. OPTION: a mode, whose draws are all illegal; or "untagged", the control.

Each rank runs its own list of calls: epochs over different numbers of batches, some left early, flushes, saves, loads,
a second accumulator, an exception, or an early end. A draw ends in one of two ways: no rank raises an error, and all
hold the parameters of plain training (NumPy, float64); or every rank raises an error.

A rank that has ended tells the others, as msrun does by ending them: so they do not wait for it.
"""
import json
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from ms_accum import DataParallel, load_checkpoint, make_train_step, save_checkpoint, shard_parameters, until_weight
from ms_accum.distributed.exchange import ManyRanks
from ms_accum.distributed.tags import TRAIN, WAIT, Tags, announce, forget_disagreement
from ms_accum.tensors import as_vector

RATE, BUDGET, FEATURES = 0.1, 3, 3


class Mode(NamedTuple):
    """How an accumulator is built, and how its windows are made."""

    length: object = 2
    reducer: DataParallel = DataParallel()
    on_nonfinite: str = "apply"


MODES = {"window": Mode(), "alone": Mode(length=1), "zero": Mode(reducer=DataParallel(zero=1)),
         "skip": Mode(on_nonfinite="skip_window"), "budget": Mode(length=until_weight(BUDGET)),
         "microbatch": Mode(reducer=DataParallel(sync="microbatch"))}
# Where ranks sum each microbatch, a graph goes on after a disagreement: the kernels of one rank may then wait for
# another rank, until msrun ends it. So a disagreement ends the launch.
ENDS_LAUNCH = ("microbatch",)


# --- programs ---------------------------------------------------------------------------------------------------------


def batches_of(rng, nonfinite):
    """Draw an epoch's batches: samples of each."""
    return [(rng.randint(1, 2), rng.randrange(10**6), nonfinite and rng.random() < 0.15)
            for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 6)))]


def drawn(number, ranks, mode=None):
    """Return the mode, the program of each rank, and whether the draw is legal.

    A call is `(name, accumulator, ...)`: ("epoch", which, batches, left after how many or None), ("calls", which,
    batches), ("twins", batches), ("flush", which), ("save",), ("load",), ("raise",).
    """
    rng, is_given = random.Random(number), mode is not None
    mode = mode or rng.choice(list(MODES))
    nonfinite, count = MODES[mode].on_nonfinite != "apply", rng.randint(1, 3)
    programs: list[list[tuple]] = [[] for _ in range(ranks)]
    has_saved = False
    for _ in range(count):
        kind = rng.choice(("epoch", "epoch", "epoch", "calls", "twins", "save", "load"))
        which = rng.randrange(2)
        if kind == "save" or (kind == "load" and has_saved):
            has_saved = True
            for program in programs:
                program.append((kind,))
        elif kind == "twins":
            one = batches_of(rng, False)
            for program in programs:
                program.append(("twins", [(size, rng.randrange(10**6), False) for size, _, _ in one]))
                program += [("flush", 0), ("flush", 1)]
        elif kind == "calls":
            for program in programs:
                program += [("calls", which, batches_of(rng, nonfinite)), ("flush", which)]
        else:
            for program in programs:
                batches = batches_of(rng, nonfinite)
                left = rng.randint(1, len(batches)) if batches and rng.random() < 0.4 else None
                program += [("epoch", which, batches, left), ("flush", which)]
    is_legal = rng.random() < (0 if is_given else 1 if mode in ENDS_LAUNCH else 0.5)
    if not is_legal:
        perturb(rng, rng.choice(programs))
    return mode, programs, is_legal


def perturb(rng, program):
    """Change the program of one rank."""
    place = rng.randrange(len(program) + 1)
    kind = rng.choice(("drop", "end", "insert", "insert", "raise", "swap", "early"))
    epochs = [i for i, call in enumerate(program) if call[0] == "epoch" and call[2]]
    if kind == "insert" or not program:
        program.insert(place, rng.choice((("flush", 0), ("flush", 1), ("save",), ("load",),
                                          ("calls", 0, [(1, 1, False)]), ("epoch", 1, [], None),
                                          ("epoch", 0, [(2, 2, False)] * 3, None))))
    elif kind == "end":
        del program[place:]
    elif kind == "raise":
        program.insert(place, ("raise",))
    elif kind == "swap" and len(program) > 1:
        i = rng.randrange(len(program) - 1)
        program[i], program[i + 1] = program[i + 1], program[i]
    elif kind == "early" and epochs:
        i = rng.choice(epochs)
        program[i] = (*program[i][:3], rng.randint(1, len(program[i][2])))
    else:
        del program[min(place, len(program) - 1)]


def data_of(batch):
    """Return `(x (n, 3), y (n, 1))` of a batch."""
    samples, seed, has_nan = batch
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(samples, FEATURES)), rng.normal(size=(samples, 1))
    return np.float32(x), np.float32(np.nan if has_nan else y)


# --- what ranks do ----------------------------------------------------------------------------------------------------


class Ranks:
    """Two accumulators of a mode, with their networks: built once."""

    def __init__(self, mode):
        self.mode = MODES[mode]
        self.networks = [nn.Dense(FEATURES, 1, weight_init="zeros", bias_init="zeros") for _ in range(2)]
        for name, network in zip("ab", self.networks):
            network.update_parameters_name(f"{mode}.{name}.")
        self.steps = [self._step(network) for network in self.networks]
        self.start = [[p.asnumpy().copy() for p in step.accumulator.parameters] for step in self.steps]

    def _step(self, network):
        mode = self.mode

        def forward_fn(x, y):
            return ((network(x) - y) ** 2).mean()

        parameters = network.trainable_params()
        optimizer = nn.SGD(shard_parameters(parameters) if mode.reducer.zero else parameters, RATE)
        return make_train_step(forward_fn, optimizer, mode.length, reducer=mode.reducer,
                               on_nonfinite=mode.on_nonfinite)

    def begin(self):
        """Begin a draw: everything as it was built."""
        for network, step, start in zip(self.networks, self.steps, self.start):
            with step.boundary.loading(is_open=False):
                for parameter, value in zip(step.accumulator.parameters, start):
                    ops.assign(parameter, Tensor(value))
                for parameter in network.trainable_params():
                    ops.assign(parameter, ops.zeros_like(parameter))
            step.boundary.end_epoch()

    def run(self, call, folder):
        """Make one call of a program."""
        name, *arguments = call
        path = folder / "run.safetensors"
        if name == "epoch":
            which, batches, left = arguments
            for i, _ in enumerate(self.steps[which].epoch(map(data_of, batches)), 1):
                if i == left:
                    break
        elif name == "calls":
            for batch in arguments[1]:
                self.steps[arguments[0]](*data_of(batch))
        elif name == "twins":
            for batch in arguments[0]:
                for step in self.steps:
                    step(*data_of(batch))
        elif name == "flush":
            self.steps[arguments[0]].flush()
        elif name == "save":
            save_checkpoint(path, self.networks[0], self.steps[0])
        elif name == "load":
            load_checkpoint(path, self.networks[0], self.steps[0])
        else:
            raise ValueError("an error of the script")

    def end(self):
        """End a program: what a rank would be warned of when its process ends is an error."""
        for step in self.steps:
            if step.status().mini_step > 0:
                raise RuntimeError("a window of the accumulator is lost")

    def parameters(self):
        return [p.asnumpy().ravel().tolist() for network in self.networks for p in network.trainable_params()]


def meet(has_failed):
    """Meet all ranks at the end of a draw. Return what it said, if ranks did not meet at the first attempt."""
    said = []
    while len(said) < 20:
        try:
            announce(WAIT, int(has_failed and not said))  # another number: a rank that fails ends the run
            return said
        except RuntimeError as error:
            said.append(str(error))
            has_failed = False
    raise RuntimeError(f"ranks do not meet: {said}")


def main(folder, first, count, option=None):
    ms.set_device("CPU")
    init()
    rank, ranks, built = get_rank(), get_group_size(), {}
    if option == "untagged":
        Tags.compare, ManyRanks.announce = untagged, lambda self, what: None
    for number in range(first, first + count):
        forget_disagreement()  # of the draw before
        mode, programs, _ = drawn(number, ranks, option if option in MODES else None)
        if mode not in built:
            built[mode] = Ranks(mode)
        built[mode].begin()
        meet(False)
        start, said = perf_counter(), None
        try:
            for call in programs[rank]:
                built[mode].run(call, folder)
            built[mode].end()
        except Exception as error:
            if option in MODES:
                raise
            said = f"{type(error).__name__}: {error}"
        others = meet(said is not None)
        if said is None and others:
            said = f"RuntimeError: {others[0]}"
        found = {"number": number, "said": said, "seconds": perf_counter() - start,
                 "parameters": built[mode].parameters()}
        with (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def untagged(self, number, rounds, numbers, held=0):
    """In place of `Tags.compare`: all ranks agree."""
    flat = self.rows(as_vector((TRAIN, number, rounds, held, 1.0, *numbers)))
    return Tensor(True), flat.reshape(self.size, -1)[:, 5:].sum(0), flat


# --- plain training ---------------------------------------------------------------------------------------------------


def expected(mode, programs):
    """Return the parameters of each network: NumPy, float64."""
    plain, saved = np.zeros((2, FEATURES + 1)), None
    for event, *made in zip(*map(events_of, programs), strict=True):
        assert all(name == event[0] for name, _ in made), "ranks without an error have made the same calls"
        if event[0] == "save":
            saved = plain[0].copy()
        elif event[0] == "load":
            plain[0] = saved
        else:
            train_plain(plain[event[0]], mode, [batches for _, batches in (event, *made)])
    return plain


def events_of(program):
    """Return what a rank does: ("save", []), ("load", []), or (which accumulator, the batches that a flush ends)."""
    events, open_, ended = [], [[], []], [False, False]

    def train(which, batches):
        open_[which] += batches
        ended[which] = ended[which] and not batches

    def end(which):
        events.append((which, open_[which]))
        open_[which] = []

    for name, *arguments in program:
        if name in ("save", "load"):
            events.append((name, []))
        elif name == "twins":
            train(0, arguments[0])
            train(1, arguments[0])
        elif name == "calls":
            train(*arguments)
        elif name == "epoch":
            which, batches, left = arguments
            train(which, batches[:left])
            if left in (None, len(batches)):
                end(which)
                ended[which] = True
        elif ended[arguments[0]]:
            ended[arguments[0]] = False
        else:
            end(*arguments)
    return events


def train_plain(weights, mode, of_ranks):
    """Train an epoch in place: the windows of all ranks, one after the other."""
    if MODES[mode].reducer.sync == "microbatch":
        windows = [[batch for batches in of_ranks for batch in batches[i:i + 2]]
                   for i in range(0, max(map(len, of_ranks)), 2)]
    else:
        cut = [list(windows_of(mode, batches)) for batches in of_ranks]
        windows = [[batch for of_rank in cut for window in of_rank[i:i + 1] for batch in window]
                   for i in range(max(map(len, cut)))]
    for window in windows:
        if any(has_nan for _, _, has_nan in window):
            continue
        x, y = (np.concatenate(each).astype(float) for each in zip(*map(data_of, window)))
        x = np.c_[x, np.ones(len(x))]
        gradient = 2 * ((x @ weights)[:, None] - y).ravel() @ x / len(x)
        weights -= RATE * gradient


def windows_of(mode, batches):
    """Yield the windows of one rank."""
    window, length = [], MODES[mode].length
    for batch in batches:
        window.append(batch)
        full = sum(size for size, *_ in window) >= BUDGET if not isinstance(length, int) else len(window) == length
        if full:
            yield window
            window = []
    if window:
        yield window


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:])
