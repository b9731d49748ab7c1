"""What each rank of a test run does: `rank_cases.py FOLDER CASE...`, started by msrun from launch.py.

A case is the name of a function below and its arguments, joined by colons. What it returns goes into
FOLDER/rank<r>.json under the name of the case.
"""
import json
import os
import sys
import warnings
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter, sleep
from unittest.mock import patch

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from ms_accum import Accumulator, DataParallel, make_train_step, shard_parameters
from ms_accum.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from ms_accum.distributed import meeting
from ms_accum.distributed.exchange import BUILD, LOAD, SAVE
from support import protocols, run_blocks, tiny
from support.modes import running
from support.pages import PAGES, blocks_of, written
from support.protocols import KINDS, batch_of, drawn, expected, flat, forward_of, network_of, optimizer_of, step_of
from support.scripts import run_here

LM = ("--text", "text", "--epochs", "2", "--batch-size", "4")
FAST = ("fast",)
LAUNCHES = {  # ranks, cases
    "fast": (2, ["drawn:0:12", "named", "calls", "by_hand", "values", "resumed", "held", "evaluated", "recipes:1",
                 "failing"]),
    "drawn": (2, [f"drawn:{first}:100" for first in range(100, 500, 100)]),
    "four": (4, ["drawn:1000:100", "values", "resumed"]),
    "uncompared": (2, ["uncompared"]),
    "optimizers": (2, ["optimizers"]),
    "left": (2, ["left_alone"]),
    "scripts": (2, ["compare:0", "compare:1", "lm", "recipes:99"]),
}
PLAIN = drawn(2, 2)._replace(kind="window", length=2, tokens=False, is_sum=False, clip_norm=None, adam=True,
                             bucket_mib=32, drops="apply", pieces=1, compiled=False, min_weight=None)


def every(kind):
    """Parametrize a test by the cases that call the function `kind`; only those of the fast launches are fast."""
    return pytest.mark.parametrize(("launch", "case"), [
        pytest.param(launch, case, marks=[] if launch in FAST else [pytest.mark.slow])
        for launch, (_, cases) in LAUNCHES.items() for case in cases if case.split(":")[0] == kind])


def said_by(function, *arguments, **options):
    """The type and message of the error that a call raises, or "accepted". What a process has found is forgotten."""
    meeting._ended.clear()  # noqa: SLF001
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def four(rank, epoch=0):
    """Four batches of a rank."""
    return [batch_of((3, 1000 * epoch + 10 * rank + i, False)) for i in range(4)]


def drawn_(rank, first, count):
    """{number: [whether it is legal, what came of it]}"""
    ranks = get_group_size()
    draws = {number: drawn(number, ranks) for number in range(int(first), int(first) + int(count))}
    return {number: [draw.is_legal, protocols.result_of(draw, rank)] for number, draw in draws.items()}


def uncompared(rank):
    """Control: as `drawn`, but rows are not compared. A collective that finds no partner ends the launch."""
    meeting.Meeting._meet = lambda self, what, number=0, sums=(0, 0, 0): np.array([[0, 0, number, 0, 0, 0]])  # noqa: SLF001
    return drawn_(rank, 0, 60)


def named(rank):
    """{"settings": {what differs on rank 1: what each rank says}; another fault: what each rank says}"""
    def built(reducer=DataParallel(), rate=0.1, length=2, sliced=False, kind=nn.SGD, **options):  # noqa: B008
        network = network_of(0)
        parameters = network.trainable_params()
        optimizer = kind(shard_parameters(parameters) if sliced else parameters, rate)
        loss_fn = forward_of(network, PLAIN, options.get("loss_reduction") == "sum")
        make_train_step(loss_fn, optimizer, length, reducer=reducer, eager=True, network=network, **options)

    def weight_fn(x, label, mask):
        return len(x)

    different = {
        "alike": {}, "accumulate_step": {"length": 3}, "zero= of DataParallel": {"reducer": DataParallel(zero=1)},
        "sync= of DataParallel": {"reducer": DataParallel(sync="microbatch")},
        "learning rates and options of the optimizer": {"rate": 0.2}, "the optimizer": {"kind": nn.RMSProp},
        "clip_norm": {"clip_norm": 1.0}, "min_weight": {"min_weight": 1.0}, "pieces": {"pieces": 2},
        "weight_fn": {"weight_fn": weight_fn},
        "on_nonfinite": {"on_nonfinite": "skip_window"}, "loss_reduction": {"loss_reduction": "sum"},
        "buffer_dtype": {"buffer_dtype": ms.float16}, "batch_axis": {"batch_axis": 1},
        "stages": {"loss_scaler": amp.StaticLossScaler(2.0)},
        "which parameters of the optimizer are slices": {"sliced": True}}
    return {
        "settings": {name: said_by(built, **(options if rank else {})) for name, options in different.items()},
        "frozen": said_by(_frozen, rank),
        "kind": said_by(partial(Accumulator, reduction="mean", reducer=DataParallel()) if rank else make_train_step_of,
                        nn.SGD(network_of(0).trainable_params(), 0.1), 2),
        "nodes": said_by(built, DataParallel(sync="node", ranks_per_node=3)),
        "no slices": said_by(built, DataParallel(zero=1)),
        "slices": said_by(built, sliced=True), "no reducer": said_by(built, None, sliced=True),
        "Lamb": said_by(built, DataParallel(zero=1), sliced=True, kind=nn.Lamb),
        "alone": said_by(_warned, built, None)}


def make_train_step_of(optimizer, length):
    make_train_step(lambda x: x, optimizer, length, reducer=DataParallel(), eager=True)


def _warned(function, *arguments, **options):
    with pytest.warns(UserWarning, match="give") as caught:
        function(*arguments, **options)
    raise UserWarning(str(caught[0].message))


def _frozen(rank):
    network = network_of(0)
    network[0].weight.requires_grad = False
    ops.assign(network[0].weight, network[0].weight + float(rank))
    make_train_step(forward_of(network, PLAIN, False), nn.SGD(network.trainable_params(), 0.1), 2, eager=True,
                    reducer=DataParallel(), network=network)


def trains(rank, step, inside=lambda i: None, epochs=(0,)):
    for epoch in epochs:
        for i, _ in enumerate(step.epoch(four(rank, epoch))):
            if inside(i) == "break":
                break


def leaves(rank, step, network):
    trains(rank, step, lambda i: "break" if (rank, i) == (0, 1) else None)


def saves(rank, step, network):
    exchange = step.boundary.window.exchange
    trains(rank, step, lambda i: exchange.compare(SAVE, step.boundary.compared()) if (rank, i) == (1, 1) else None)


def flushes_inside(rank, step, network):
    trains(rank, step, lambda i: step.flush() if (rank, i) == (0, 1) else None)


def changes_state(rank, step, network):
    state = step.optimizer.global_step
    trains(rank, step, lambda i: ops.assign(state, state * 2 + 1) if (rank, i) == (1, 0) else None)


PROGRAMS = {"leave": leaves, "save": saves, "flush inside": flushes_inside, "state": changes_state}


def calls(rank):
    """{kind of exchange: {a call that only one rank makes, inside an epoch: what a rank says}}"""
    def run(program, options):
        network, step = step_of(PLAIN, 0, DataParallel(**options))
        program(rank, step, network)
        trains(rank, step, epochs=(1, 2))

    return {kind: {name: said_by(run, program, options) for name, program in PROGRAMS.items()}
            for kind, options in KINDS.items()}


def by_hand(rank):
    """{kind: [how far parameters are off, which calls closed a window, what a call and another sync say]}"""
    found = {}
    ms.set_context(mode=ms.GRAPH_MODE)
    for kind in ("window", "zero1"):
        reducer, network = DataParallel(**KINDS[kind]), network_of(0)
        parameters = network.trainable_params()
        optimizer = optimizer_of(shard_parameters(parameters) if reducer.zero else parameters, PLAIN)
        accumulator = Accumulator(optimizer, 2, reduction="mean", reducer=reducer)
        grad_fn = ms.value_and_grad(forward_of(network, PLAIN, False), None, accumulator.weights)

        def add(*batch, grad_fn=grad_fn, accumulator=accumulator):
            loss, gradients = grad_fn(*batch)
            return loss, accumulator.add(gradients, len(batch[0]))

        add, closed = ms.jit(add), []
        for batch in four(rank):
            add(*map(Tensor, batch))
            closed.append(accumulator.close())
        accumulator.flush()
        ms.set_context(mode=ms.PYNATIVE_MODE)
        programs = [[("calls", 0, [(3, 10 * other + i, False) for i in range(4)])] for other in range(2)]
        wanted = expected(PLAIN._replace(programs=programs), 0)[0]
        found[kind] = [float(np.abs(flat(network) - wanted).max()), closed,
                       said_by(accumulator, tuple(accumulator.weights)),
                       said_by(Accumulator, optimizer, 2, reduction="mean",
                               reducer=DataParallel(sync="microbatch", zero=2 * reducer.zero))]
    return found


def values(rank):
    """What ranks send each other on the host: {name: value}"""
    found = {}
    for kind in (*KINDS, *(protocols.NODES if get_group_size() == 4 else {})):
        draw = PLAIN._replace(kind=kind)
        network, step = step_of(draw, 0)
        exchange, whole = step.boundary.window.exchange, network[0].weight
        for _ in step.epoch(four(rank)):
            pass
        state = next((p for name, p in step.boundary.rates.state.items() if name.startswith("moment1")), None)
        joined = exchange.joined(state, whole)
        cut = exchange.cut(joined, whole)
        bits = exchange.sent(np.array([np.nan, -0.0, rank, 2**-140], np.float32))
        found[kind] = {
            "gathered": exchange.gathered({"rank": rank, "more": "x" * rank}), "joined": flat_list(joined),
            "cut": bool((cut == state.asnumpy()).all()), "sizes": [state.size, whole.size],
            "sent": bits.tobytes().hex(), "half": exchange.sent(np.array([rank + 1.5], np.float16)).tolist(),
            "together": said_by(exchange.together, SAVE, partial(_fails_on_rank_1, rank), KeyError),
            "alike": said_by(exchange.require_alike, LOAD, {"a": 1}),
            "apart": said_by(exchange.require_alike, LOAD, {"a": 1, "b": 2 * (rank == 1)}),
            "equal": said_by(exchange.compare, BUILD, {"state": [whole]})}
    return found


def flat_list(value):
    return np.round(value.ravel().astype(float), 6).tolist()


def _fails_on_rank_1(rank):
    if rank == 1:
        raise OSError("no such file")


def resumed(rank):
    """{kind: how far a run that was stopped ends from an unbroken one: saved in `on_update`, and in an open window}"""
    data = [[batch_of((2 + i % 2, 100 * epoch + 10 * rank + i, False)) for i in range(7 - rank % 4)]
            for epoch in range(2)]
    found = {}
    def finish(network, step):
        for epoch in range(step.epochs, 2):
            for _ in step.epoch(data[epoch], skip=step.trained):
                pass
        return flat(network)

    for kind in (*KINDS, *(protocols.NODES if get_group_size() == 4 else {})):
        draw, path = PLAIN._replace(kind=kind), FOLDER / f"{kind}.safetensors"
        unbroken, found[kind] = finish(*step_of(draw, 0)), []
        for stops in ("update", "window"):
            network, step = step_of(draw, 0)
            save = partial(save_checkpoint, path, network)
            if stops == "update":
                step.on_update(lambda step, save=save: step.update_step == 2 and save(step))
                finish(network, step)
            else:
                list(islice(step.epoch(data[0]), 3))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    save(step)
            network, step = step_of(draw, 1)
            load_checkpoint(path, network, step)
            found[kind].append(float(np.abs(finish(network, step) - unbroken).max()))
    return found


def held(rank):
    """{kind: (bytes of the optimizer's moments, and of the buffers, by bytes of the parameters)}"""
    found = {}
    for kind in KINDS:
        network, step = step_of(PLAIN._replace(kind=kind), 0)
        moments = [p for name, p in step.boundary.rates.state.items() if name.startswith("moment")]
        whole = sum(p.size for p in network.trainable_params())
        found[kind] = [sum(p.size for p in part) / whole for part in (moments, step.boundary.window.buffers)]
    return found


def evaluated(rank):
    """The mean over both ranks' data; what is said where one has none, where one fails, and where neither has data."""
    _, step = step_of(PLAIN, 0)
    data = four(rank)[:4 - rank]
    _, alone = step_of(PLAIN, 0, DataParallel())
    broken = iter([*data[:1], (None,)]) if rank else data
    return {"both": step.evaluate(data), "one": step.evaluate([] if rank else data), "own": own_mean(data),
            "none": said_by(step.evaluate, []), "broken": said_by(alone.evaluate, broken),
            "after": alone.evaluate(data)}


def own_mean(data):
    network = network_of(0)
    return float(forward_of(network, PLAIN, False)(*(Tensor(np.concatenate(column)) for column in zip(*data))))


def optimizers(rank):
    """{optimizer: how far two epochs of ZeRO 1 and 2 end from those without it, and how far they moved}"""
    found = {}
    kinds = [getattr(nn, name) for name in ("ASGD", "Adam", "AdaMax", "Adagrad", "AdamWeightDecay", "FTRL", "LazyAdam",
                                            "Momentum", "ProximalAdagrad", "RMSProp", "Rprop", "SGD")]
    for kind in [*kinds, nn.AdamOffload]:
        ended = []
        for options in ({}, {"zero": 1}, {"zero": 2}):
            network = network_of(0)
            parameters = network.trainable_params()
            groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:]}]
            groups = parameters if kind is nn.FTRL else groups  # it takes one rate
            more = {"momentum": 0.9} if kind is nn.Momentum else {}
            optimizer = kind(shard_parameters(groups) if options else groups, learning_rate=0.02, **more)
            step = make_train_step(forward_of(network, PLAIN, False), optimizer, 2, reducer=DataParallel(**options),
                                   clip_norm=0.3, network=network)
            for epoch in range(2):
                for _ in step.epoch(four(rank, epoch)):
                    pass
            ended.append(flat(network))
        found[kind.__name__] = [float(np.abs(end - ended[0]).max()) for end in (*ended[1:], flat(network_of(0)))]
    return found


def compare(rank, zero):
    """The difference between parameters that tutorials/mnist/compare.py finds, and the loss of each update."""
    found = run_here("mnist", "--epochs", "2", "--batch-size", "400", "--momentum", "0.9", "--zero", zero,
                     script="compare.py")
    return float(found["difference"]), found["histories"]["accumulated"][1]


def lm(rank):
    """Train tutorials/lm/train.py on a small text, and save."""
    folder = FOLDER / "lm"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    Path("text").write_bytes(tiny.text(100))
    run_here("lm", *LM, "--accumulate-step", "2", "--save", "run.safetensors")


def recipes(rank, count):
    """What the first blocks of recipes.md print, in one folder of all ranks; op by op if not all of them run."""
    blocks, folder = blocks_of(PAGES["recipes"]), FOLDER / f"recipes-{count}"
    path = written(FOLDER / f"recipes_{count}_{rank}.py", blocks[:int(count)])
    folder.mkdir(exist_ok=True)
    with running("jit" if int(count) >= len(blocks) else "pynative"):
        return [printed for printed, _ in run_blocks.run(path, folder)]


def left_alone(rank):
    """What rank 1 says when the disk of rank 0 takes longer than MindSpore waits."""
    network, step = step_of(PLAIN, 0)
    with patch("ms_accum.checkpoint.checkpoint.write_file", lambda *_: sleep(60)):
        return said_by(save_checkpoint, FOLDER / "slow.safetensors", network, step)


def failing(rank):
    """Train until rank 1 raises an error. The last case, for no rank comes back from it."""
    _, step = step_of(PLAIN, 0)
    for i in range(10**6):
        step(*four(rank)[0])
        if i == 20 and rank == 1:
            raise ValueError("no more digits")


def main(*cases):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    init()
    rank, found = get_rank(), {}
    functions = {**globals(), "drawn": drawn_}
    for case in cases:
        name, *arguments = case.split(":")
        start = perf_counter()
        ms.set_context(mode=ms.PYNATIVE_MODE)
        meeting._ended.clear()  # noqa: SLF001
        found[case] = functions[name](rank, *arguments)
        print(f"rank {rank}: {case}  {perf_counter() - start:.1f} s", flush=True)
        (FOLDER / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    ops.AllGather()(Tensor([rank])).asnumpy()  # no rank ends before the others


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    main(*sys.argv[2:])
