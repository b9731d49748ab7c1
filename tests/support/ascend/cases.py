"""What is compiled in a dry run. A process builds the cases that it is told to, in turn, and reports in JSON.

The values of a dry run are 0, and so are the counters: what closes a window is called directly.
"""
import gc
import inspect
import json
import sys
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, mint, nn, ops, recompute
from mindspore.dataset import GeneratorDataset
from mindspore.experimental import optim
from mindspore.train import Model

from ms_accum import (
    Accumulator,
    DataParallel,
    TrainOneStepCell,
    make_grad_cache_step,
    make_train_step,
    shard_parameters,
)
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.core import window
from ms_accum.core.graphs import straight
from ms_accum.core.kernels import Portable
from ms_accum.distributed.ranks import ManyRanks
from ms_accum.mindspore_api import jit_class
from support.drivers import Driver
from support.layers import Block, LazyBlock, Tied
from support.scripts import module

SIZE, LAYERS, ROWS = 64, 2, 16
WIDE, DEEP = 512, 13  # where memory is weighed


class Network(nn.Cell):
    """`layers` times Dense, and the mean of what comes out. With `backwards`, the last layer is used first."""

    def __init__(self, dtype=ms.bfloat16, size=SIZE, layers=LAYERS, backwards=False, activation=None):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(size, size, dtype=dtype, activation=activation) for _ in range(layers)])
        self.order = tuple(range(layers))[::-1 if backwards else 1]

    def construct(self, x):
        for i in self.order:
            x = self.layers[i](x)
        return x.astype(ms.float32).mean()


class Named(nn.Cell):
    """Two layers, each with a name of its own: O1 leaves those that are reached by an index in float32."""

    def __init__(self):
        super().__init__()
        self.first, self.second = [nn.Dense(SIZE, SIZE) for _ in range(LAYERS)]

    def construct(self, x):
        return self.second(self.first(x)).astype(ms.float32).mean()


def rows(dtype=ms.bfloat16, size=SIZE, count=ROWS):
    return Tensor(np.zeros((count, size)), dtype)


def momentum(parameters):
    return nn.Momentum(parameters, 1e-3, 0.9)


def adam(parameters):
    return nn.Adam(parameters, 1e-3)


def decayed(parameters):
    return nn.AdamWeightDecay(parameters, 1e-3)


# --- ways to train: each compiles what adds a microbatch, and all that closes a window --------------------------------


def train(dtype=ms.bfloat16, optimizer=decayed, layers=LAYERS, declared=None, **options):
    network = Network(dtype, layers=layers)
    data = rows(dtype) if declared is None else declare(network, declared, dtype)
    train_network(network, optimizer(network.trainable_params()), data, **options)


def declare(network, declared, dtype):
    """Declare the shape of a batch, and return one of `ROWS` rows or tokens."""
    network.set_inputs(Tensor(shape=[*declared], dtype=dtype))
    rest = ROWS // int(np.prod([length for length in declared[:-1] if length is not None]))
    return Tensor(np.zeros([rest if length is None else length for length in declared]), dtype)


def train_network(network, optimizer, *batch, accumulate_step=2, **options):
    step = make_train_step(network, optimizer, accumulate_step, **options)
    # With dynamic shapes, a dry run compiles a graph, and then cannot plan its memory.
    with suppress(RuntimeError) if network.get_inputs() else nullcontext():
        step(*batch)
    closing(step)()


def closing(accumulator):
    """Return the graph that closes a window, as the boundary compiles it. (It holds only the window.)"""
    window = accumulator.boundary.window
    window.unit = window.unit or 1.0
    return straight(window.close, window)


def tokens(x):
    return (x != 0).sum().astype(ms.float32)


def amp_level(level):
    network = Named()
    train_network(amp.auto_mixed_precision(network, level), momentum(network.trainable_params()), rows(ms.float32))


def driver_of(name, network, optimizer, weight_fn=None, **options):
    return Driver(name, network, optimizer(network.trainable_params()), 2, weight_fn, settings={"clip_norm": 1.0},
                  **options)


def driven(name, dtype=ms.bfloat16, optimizer=decayed, **options):
    with driver_of(name, Network(dtype), optimizer, **options) as driver:
        driver(rows(dtype))
        closing(driver)() if driver.mode == "graph" else driver.boundary.window.close()
        ms.runtime.synchronize()
    ms.set_context(mode=ms.GRAPH_MODE)


def sink():
    network = Network(ms.float32)
    data = GeneratorDataset([(np.zeros(SIZE, np.float32),)] * ROWS, ["x"]).batch(ROWS)
    Model(TrainOneStepCell(network, momentum(network.trainable_params()), 2)).train(1, data, dataset_sink_mode=True)


def grad_cache():
    tower = nn.Dense(SIZE, 8)

    def encode(x):
        return tower(x)

    def spread(representations):
        return ops.square(ops.matmul(representations, representations.T)).mean()

    step = make_grad_cache_step(encode, spread, momentum(tower.trainable_params()), 2, pieces=2)
    with patch.object(Tensor, "__bool__", lambda _: True):  # "the same in both passes", which reads as 0
        step(rows(ms.float32))
    closing(step)()


def language_model():
    """As tutorials/lm/train.py trains it."""
    lm = module("lm", "network")
    network = lm.Network(0)
    batch = Tensor(np.zeros((4, 32)), ms.int32)
    loss = lm.BitsPerByte(network)
    train_network(loss, adam(network.trainable_params()), batch, weight_fn=lm.count_bytes, clip_norm=1.0)


def vit(level="O0"):
    from mindcv.models.vit import VisionTransformer
    images(VisionTransformer(image_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=4, num_classes=10), level)


def resnet18():
    import mindcv
    images(mindcv.create_model("resnet18", num_classes=10), "O0")


def images(network, level):
    optimizer = momentum(network.trainable_params())
    network = nn.WithLossCell(amp.auto_mixed_precision(network, level), nn.CrossEntropyLoss())
    train_network(network, optimizer, Tensor(np.zeros((4, 3, 32, 32)), ms.float32), Tensor(np.zeros(4), ms.int32))


def among_ranks(train, optimizer, **options):
    """What `train` returns in one of several ranks."""
    from mindspore.communication import GlobalComm, init
    if not GlobalComm.INITED:
        init()
    # Whether the ranks are alike is asked of the device, which answers 0.
    reducer = DataParallel(**options)
    sharding = shard_parameters if reducer.zero else list
    return train(lambda parameters: optimizer(sharding(parameters)), reducer)


def ranks(**options):
    among_ranks(lambda optimizer, reducer: train(ms.float32, optimizer, reducer=reducer), momentum, **options)


def clipped_ranks(zero):
    """In bfloat16, where norms and what is skipped are those of all ranks."""
    among_ranks(lambda optimizer, reducer: train(
        ms.bfloat16, optimizer, reducer=reducer, clip_norm=1.0, on_nonfinite="skip_window"), decayed, zero=zero)


# --- optimizers -------------------------------------------------------------------------------------------------------

# Base classes, and a wrapper that needs the service MindIO.
NOT_BUILT = {"nn.Optimizer", "experimental.optim.Optimizer", "nn.OptTFTWrapper"}
OPTIONS = {"nn.Momentum": {"momentum": 0.9}, "nn.AdaFactor": {"relative_step": False}}


def optimizers(dtype):
    """Compile an update with each optimizer of MindSpore. Of those that fail, return whether they compile alone."""
    names, failed = [], {}
    for library in (nn, optim, mint.optim):
        for name, made in vars(library).items():
            name = f"{library.__name__.removeprefix('mindspore.')}.{name}"
            if inspect.isclass(made) and issubclass(made, (nn.Optimizer, optim.Optimizer)) and name not in NOT_BUILT:
                optimizer = built(name, made, Network(dtype, layers=1).trainable_params())
                names.append(name)
                accumulator = Accumulator(optimizer, 2, reduction="mean")  # kept: its graph holds only the window
                if not compiles(closing(accumulator)):
                    failed[name] = compiles(alone_with(optimizer))
    return {"compiled": sorted(set(names) - set(failed)), "failed": failed}


def built(name, made, parameters):
    if made is nn.LARS:
        return made(momentum(parameters))
    rate = "learning_rate" if name.startswith("nn.") else "lr"
    return made(parameters, **{rate: 1e-3}, **OPTIONS.get(name, {}))


def alone_with(optimizer):
    def update(*gradients):
        return optimizer(gradients)

    return lambda: ms.jit(update)(*[Tensor(np.zeros(p.shape), p.dtype) for p in optimizer.parameters])


def compiles(function):
    try:
        function()
    except TypeError:
        return False
    return True


# --- memory -----------------------------------------------------------------------------------------------------------


def peak(run, parameters):
    """Return bytes per parameter at the peak of the second call of `run`."""
    run()
    ms.runtime.synchronize()
    ms.runtime.reset_max_memory_allocated()
    run()
    ms.runtime.synchronize()
    return ms.runtime.max_memory_allocated() / parameters


def memory(optimizer=decayed, dtype=ms.bfloat16, order="forward", layers=DEEP, activation=None, **options):
    """Bytes per parameter at the peak of an addition and of an update."""
    network = Network(dtype, WIDE, layers, order == "backwards", activation)
    parameters = network.trainable_params()
    grouped = [{"params": parameters[1::2]}, {"params": parameters[::2]}]  # biases, and weights, which decay
    step = make_train_step(network, optimizer(grouped if order == "groups" else parameters), 4, **options)
    data, count = rows(dtype, WIDE), sum(p.size for p in parameters)
    before = ms.runtime.memory_allocated()
    add = peak(lambda: step(data), count)
    update = peak(closing(step), count)
    return {"add": add - before / count, "update": update - before / count}


def memory_of_ranks(activation=None, **options):
    """The same in float32 with Adam, in buckets that hold one weight or one bias each."""
    return among_ranks(lambda optimizer, reducer: memory(optimizer, ms.float32, activation=activation, reducer=reducer),
                       adam, bucket_mib=1, **options)


def memory_unordered(activation=None, **options):
    """The control: MindSpore's own order of kernels, in which the backward pass runs ahead of the exchange."""
    connect = ManyRanks.connect

    def connected(self, *exchanged):
        connect(self, *exchanged)
        self.jit_options = {}

    with patch.object(ManyRanks, "connect", connected):
        return memory_of_ranks(activation, **options)


def memory_of_language_model(reduction=None):
    """Bytes per parameter at the peak of an addition, for the network of tutorials/lm; None: equal weights."""
    lm = module("lm", "network")
    loss = lm.BitsPerByte(lm.Network(0))
    if reduction == "sum":
        loss.nll = nn.NLLLoss(ignore_index=lm.PADDING, reduction="sum")
    options = {} if reduction is None else {"weight_fn": lm.count_bytes, "loss_reduction": reduction}
    step = make_train_step(loss, adam(loss.trainable_params()), 4, **options)
    data, count = Tensor(np.zeros((1, 32)), ms.int32), sum(p.size for p in loss.trainable_params())
    before = ms.runtime.memory_allocated()
    return {"add": peak(lambda: step(data), count) - before / count}


def peak_of_addition(network, loss_sum, shape, driver="step", **options):
    """MiB at the peak of the second microbatch, above what is held before it."""
    tokens = Tensor(np.zeros(shape), ms.int32)
    if not driver.startswith("hand"):
        options["loss_reduction"] = "sum"
    with Driver(driver, loss_sum, adam(network.trainable_params()), 4, count_tokens, **options) as call:
        call(tokens, tokens)
        ms.runtime.synchronize()
        held = ms.runtime.memory_allocated()
        above = peak(lambda: call(tokens, tokens), 1) - held
    ms.set_context(mode=ms.GRAPH_MODE)
    return {"add": above / 2**20}


def count_tokens(tokens, targets):
    return (targets >= 0).sum()


class Chunk(nn.Cell):
    """The sum of the losses of some tokens. See "The head in chunks" in the guide."""

    def construct(self, states, weight, targets):
        logits = ops.MatMul(transpose_b=True)(states, weight)
        return ops.cross_entropy(logits, targets, reduction="sum")


class InTurn(nn.Cell):
    """What orders the chunks of a graph, as in the guide."""

    def construct(self, total, states, weight):
        return total, ops.depend(states, total), weight

    def bprop(self, total, states, weight, out, dout):
        return ops.depend(dout[0], (dout[1], dout[2])), dout[1], dout[2]


def memory_of_head(chunks=1, ordered=False, **options):
    """8 rows of 128 tokens, whose logits take 32 MiB, and a head of 8 MiB."""
    vocabulary, width = 8192, 256
    embedding, head = nn.Embedding(vocabulary, width), nn.Dense(width, vocabulary, has_bias=False)
    chunk, in_turn = Chunk(), InTurn()

    def loss_sum(tokens, targets):
        states, targets, weight = embedding(tokens).reshape(-1, width), targets.reshape(-1), head.weight
        if chunks == 1:
            return chunk(states, weight, targets)
        rows, total = len(targets) // chunks, Tensor(0.0)
        for part, wanted in zip(ops.split(states, rows), ops.split(targets, rows)):
            if ordered:
                total, part, weight = in_turn(total, part, weight)
            total = total + recompute(chunk, part, weight, wanted)
        return total

    return peak_of_addition(nn.CellList([embedding, head]), loss_sum, (8, 128), **options)


def memory_of_blocks(made=Block, recomputed=False, **options):
    """8 rows of 256 tokens, and 8 blocks whose widest activation takes 8 MiB."""
    network = Tied(made, recomputed, width=256, words=64, blocks=8)
    return peak_of_addition(network, network, (8, 256), **options)


in_float32 = partial(memory, momentum, ms.float32)


def memory_by_hand():
    network = Network(ms.float32, WIDE, DEEP)
    driver, data = driver_of("hand-graph", network, momentum), rows(ms.float32, WIDE)
    count, before = sum(p.size for p in network.trainable_params()), ms.runtime.memory_allocated()
    return {"update": peak(lambda: driver(data), count) - before / count}


def memory_of_copies():
    """The control: additions in the order of the parameters, and copies instead of what is done in place."""
    with patch.object(window, "kernels_for", lambda _: InOrder()):
        return in_float32(order="groups", layers=4)


@jit_class
class InOrder(Portable):
    """Kernels that add in the order of the parameters."""

    def add(self, factor, buffers, gradients):
        for buffer, gradient in zip(buffers, gradients):
            ops.assign_add(buffer, gradient.astype(buffer.dtype))


# How language models are trained.
TRAINED = {"": {}, "_in_pieces": {"pieces": 2}, "_in_groups": {"order": "groups", "clip_norm": 1.0}}
DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
RECOMPUTING = {"step": ("step", {}), "pieces": ("step", {"pieces": 8}), "cell": ("cell-graph", {}),
               "jit": ("hand-jit", {}), "op_by_op": ("hand-pynative", {})}
CASES = {
    "float32": partial(train, ms.float32, momentum), "float16": partial(train, ms.float16), "bfloat16": train,
    "pieces": partial(train, pieces=3), "alone": partial(train, accumulate_step=1),
    "clipped": partial(train, clip_norm=1.0), "token_means": partial(train, weight_fn=tokens),
    "token_sums": partial(train, weight_fn=tokens, loss_reduction="sum"),
    "token_sums_in_pieces": partial(train, weight_fn=tokens, loss_reduction="sum", pieces=3),
    "cell_of_sums": partial(driven, "cell-graph", weight_fn=tokens, loss_reduction="sum"),
    "clipped_float32": partial(train, ms.float32, momentum, clip_norm=1.0),
    "verdict": partial(train, ms.float32, momentum, on_nonfinite="skip_window", clip_norm=1.0),
    **{f"skip_{what}": partial(train, on_nonfinite=f"skip_{what}") for what in ("window", "microbatch")},
    "noise_scale": lambda: train(stages=(GradientNoiseScale(),)),
    "loss_scaler": lambda: train(ms.float16, loss_scaler=amp.DynamicLossScaler(2**10, 2, 100)),
    "sgd_in_bfloat16": partial(train, optimizer=lambda parameters: nn.SGD(parameters, 1e-3), layers=1),
    **{f"amp_{level}": partial(amp_level, level) for level in ("O1", "O2", "O3", "auto")},
    "by_hand": partial(driven, "hand-graph"), "op_by_op": partial(driven, "hand-pynative", ms.float32, momentum),
    "cell": partial(driven, "cell-graph"), "sink": sink, "grad_cache": grad_cache,
    "language_model": language_model, "vit": vit, "vit_O2": partial(vit, "O2"), "resnet18": resnet18,
    "window": partial(ranks, sync="window"), "microbatch": partial(ranks, sync="microbatch"),
    "zero1": partial(ranks, zero=1), "zero2": partial(ranks, zero=2),
    "zero1_clipped": partial(clipped_ranks, 1), "zero2_clipped": partial(clipped_ranks, 2),
    "node": partial(ranks, sync="node", ranks_per_node=2),
    **{f"memory_zero{zero}": partial(memory_of_ranks, zero=zero) for zero in range(2)},
    "memory_zero2_relu": partial(memory_of_ranks, "relu", zero=2),
    "memory_zero2_relu_unordered": partial(memory_unordered, "relu", zero=2),
    "memory_microbatch": partial(memory_of_ranks, sync="microbatch"),
    "memory_microbatch_unordered": partial(memory_unordered, sync="microbatch"),
    "node_zero2": partial(ranks, sync="node", ranks_per_node=2, zero=2),
    **{f"optimizers_{name}": partial(optimizers, dtype) for name, dtype in DTYPES.items()},
    "memory": memory, "memory_backwards": partial(memory, order="backwards"),
    "memory_groups": partial(memory, order="groups"),
    **{f"memory_token_{reduction}s{what}": partial(memory, weight_fn=tokens, loss_reduction=reduction, **options)
       for reduction in ("mean", "sum") for what, options in TRAINED.items()},
    "memory_language_model": memory_of_language_model,
    "memory_language_model_means": partial(memory_of_language_model, "mean"),
    "memory_language_model_sums": partial(memory_of_language_model, "sum"),
    "head": memory_of_head, "head_in_chunks": partial(memory_of_head, 8, True),
    "head_in_chunks_at_once": partial(memory_of_head, 8), "head_in_pieces": partial(memory_of_head, pieces=8),
    "head_in_chunks_op_by_op": partial(memory_of_head, 8, driver="hand-pynative"),
    **{f"blocks_{name}{what}": partial(memory_of_blocks, made, recomputed, driver=driver, **options)
       for name, (driver, options) in RECOMPUTING.items()
       for what, made, recomputed in (("", Block, False), ("_recomputed", Block, True), ("_lazy", LazyBlock, False),
                                      ("_lazy_recomputed", LazyBlock, True))},
    "memory_clipped": partial(memory, clip_norm=1.0), "memory_in_16_bits": partial(memory, buffer_dtype=ms.bfloat16),
    "momentum": in_float32, "momentum_groups": partial(in_float32, order="groups"),
    "momentum_clipped": partial(in_float32, clip_norm=1.0), "adam": partial(memory, adam, ms.float32),
    "adam_clipped": partial(memory, adam, ms.float32, clip_norm=1.0), "memory_by_hand": memory_by_hand,
    "any_rows": partial(train, declared=(None, SIZE)), "any_length": partial(train, declared=(4, None, SIZE)),
    "copies": memory_of_copies,
}


def main(folder, names):
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("Ascend")
    # With one thread, which MindSpore takes on a machine of two cores, a graph with a branch does not compile.
    ms.runtime.dispatch_threads_num(6)
    seen = set()
    for name in names:
        told = {"case": name}
        try:
            told["numbers"] = CASES[name]() or {}
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
        files = set(Path(folder).glob("**/graph_build_*.ir")) - seen
        seen |= files
        files = sorted(files, key=lambda file: int(file.stem.split("_")[2]))  # in the order of compilation
        print(json.dumps({**told, "files": [*map(str, files)]}), flush=True)
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
