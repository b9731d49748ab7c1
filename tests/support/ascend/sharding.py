"""Networks that MindSpore shards over 8 ranks, compiled in a dry run: what a rank holds, and what raises an error."""
from contextlib import contextmanager
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.common.initializer import initializer
from mindspore.communication import GlobalComm, get_group_size, init
from mindspore.dataset import GeneratorDataset
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.train import Model

from ms_accum import (
    Accumulator,
    DataParallel,
    FlushCallback,
    TrainOneStepCell,
    make_grad_cache_step,
    make_train_step,
    save_checkpoint,
)
from ms_accum.batch_size import GradientNoiseScale

SIZE, BATCH = 64, 16
RANKS = 8
PART = SIZE // RANKS
# What a rank holds of both parameters, and the collectives of the graph that trains.
HELD = {"semi": [[SIZE, PART], [PART, SIZE]], "optimizer": [[PART, SIZE]] * 2, "data": [[SIZE, SIZE]] * 2}
COLLECTIVES = {"semi": {"AllReduce"}, "optimizer": {"AllGather", "AllReduce", "ReduceScatter"}, "data": {"AllReduce"}}


class Network(nn.Cell):
    """Two matrix products; cut, each rank has a part of the columns of the first, and of the rows of the second."""

    def __init__(self, cut, dtype):
        super().__init__()
        self.first, self.second = (Parameter(initializer("normal", (SIZE, SIZE), dtype), name=name)
                                   for name in ("first", "second"))
        self.products, self.mean = (ops.MatMul(), ops.MatMul()), ops.ReduceMean()
        self.product, self.other = self.products
        if cut:
            self.product.shard(((1, 1), (1, get_group_size())))
            self.other.shard(((1, get_group_size()), (get_group_size(), 1)))

    def construct(self, x):
        return self.mean(self.other(self.product(x, self.first), self.second).astype(ms.float32))


class ByHand(nn.Cell):
    """The tutorial's way of training, with an accumulator."""

    def __init__(self, network, accumulator):
        super().__init__(auto_prefix=False)
        self.network, self.accumulator, self.weights = network, accumulator, accumulator.optimizer.parameters
        self.gradients_of = ops.GradOperation(get_by_list=True)

    def construct(self, x):
        loss = self.network(x)
        return ops.depend(loss, self.accumulator(self.gradients_of(self.network, self.weights)(x)))


@contextmanager
def sharding(way, interface):
    """Yield what wraps the outermost Cell: "semi" (cut as the network says), "optimizer" or "data" (cut batches)."""
    if not GlobalComm.INITED:
        init()
    if interface == "context":
        ms.set_auto_parallel_context(
            parallel_mode="semi_auto_parallel", device_num=get_group_size(), gradients_mean=True,
            dataset_strategy="full_batch" if way == "semi" else "data_parallel",
            enable_parallel_optimizer=way == "optimizer", parallel_optimizer_config={"parallel_optimizer_threshold": 0})
    try:
        yield partial(wrapped, way) if interface == "AutoParallel" else lambda cell: cell
    finally:
        ms.reset_auto_parallel_context()


def wrapped(way, cell):
    parallel = AutoParallel(cell, parallel_mode="semi_auto")
    if way == "semi":
        parallel.dataset_strategy("full_batch")
    if way == "optimizer":
        parallel.hsdp(threshold=0)
    return parallel


def batch(count=BATCH, dtype=ms.float32):
    return Tensor(np.ones((count, SIZE)), dtype)


def hand(network, accumulator, outermost, batches):
    train = outermost(ByHand(network, accumulator)).set_train()
    for x in batches:
        train(x)


def function(network, accumulator, outermost, batches):
    gradients_of = ms.value_and_grad(network, None, accumulator.optimizer.parameters)

    def train(x):
        loss, gradients = gradients_of(x)
        return ops.depend(loss, accumulator(gradients, x.shape[0]))

    train = outermost(train)
    for x in batches:
        train(x)


def cell(network, accumulator, outermost, batches):
    inner = TrainOneStepCell(network, accumulator)
    train = outermost(inner).set_train()
    for x in batches:
        train(x)
    inner.flush()


def model(network, accumulator, outermost, batches):
    rows = [(x.asnumpy(),) for x in batches]
    Model(outermost(TrainOneStepCell(network, accumulator))).train(
        1, GeneratorDataset(rows, ["x"]), callbacks=[FlushCallback()], dataset_sink_mode=False)


DRIVERS = {"hand": hand, "function": function, "cell": cell, "model": model}


def sharded(driver, way, interface="AutoParallel", dtype=ms.float32):
    """Return what a rank holds after a window of microbatches of different sizes and, in a cell, an incomplete one."""
    with sharding(way, interface) as outermost:
        network = Network(way == "semi", dtype)
        made = nn.Momentum if dtype != ms.bfloat16 else nn.AdamWeightDecay  # which has a kernel
        optimizer = made(network.trainable_params(), 0.1, 0.9)
        accumulator = Accumulator(optimizer, 2, reduction="mean")
        DRIVERS[driver](network, accumulator, outermost, [batch(count, dtype) for count in (BATCH, BATCH // 2, BATCH)])
        buffers = accumulator.window.buffers
        held = (*optimizer.parameters, *state_of(optimizer), *buffers)
        assert not any(p.has_init for p in held), "MindSpore has given some state no memory"
        try:
            save_checkpoint("run.safetensors", network, accumulator)
        except ValueError as error:
            saved = str(error)
        else:
            saved = "whole"
        return {"saved": saved.partition(",")[0], "parameters": shapes(optimizer.parameters),
                "buffers": shapes(buffers), "dtypes": [str(p.dtype) for p in buffers]}


def state_of(optimizer):
    return optimizer.moments if isinstance(optimizer, nn.Momentum) else optimizer.moments1


def shapes(parameters):
    return [list(p.shape) for p in parameters]


def refused(train, interface):
    """Return the error of a way to train that would be wrong."""
    with sharding("optimizer", interface) as outermost:
        network = Network(False, ms.float32)
        try:
            train(network, nn.Momentum(network.trainable_params(), 0.1, 0.9), outermost)
        except ValueError as error:
            return {"error": str(error)}
    return {"error": "none"}


def in_cell(network, optimizer, outermost, **options):
    cell = TrainOneStepCell(network, optimizer, 2, **options)
    outermost(cell).set_train()(batch())


def by_hand(network, optimizer, outermost, **options):
    outermost(ByHand(network, Accumulator(optimizer, 2, reduction="sum", **options))).set_train()(batch())


def in_step(network, optimizer, outermost, **options):
    make_train_step(outermost(network), optimizer, 2, **options)(batch())


def in_function(network, optimizer, outermost):
    network = outermost(network)

    def forward_fn(x):
        return network(x)

    make_train_step(forward_fn, optimizer, 2)(batch())


def in_grad_cache(network, optimizer, outermost):
    def loss_fn(x):
        return x.mean()

    make_grad_cache_step(outermost(network), loss_fn, optimizer, 1, pieces=2)(batch())


def inside(network, optimizer, outermost):
    TrainOneStepCell(outermost(network), optimizer, 2)(batch())


REFUSED = {
    "clip": partial(in_cell, clip_norm=1.0), "clip_by_hand": partial(by_hand, clip_norm=1.0),
    "skip_window": partial(in_cell, on_nonfinite="skip_window"),
    "skip_microbatch": partial(by_hand, on_nonfinite="skip_microbatch"),
    "loss_scaler": lambda *built: in_cell(*built, loss_scaler=amp.DynamicLossScaler(2**10, 2, 100)),
    "noise_scale": lambda *built: in_cell(*built, noise_scale=GradientNoiseScale()),
    "reducer": lambda *built: in_cell(*built, reducer=DataParallel()),
    "reducer_by_hand": lambda *built: by_hand(*built, reducer=DataParallel("microbatch")),
    "step": in_step, "function": in_function, "pieces": partial(in_step, pieces=2), "grad_cache": in_grad_cache}
INTERFACES = ("AutoParallel", "context")
SHARDED = {
    **{f"{driver}_{way}_{interface}": partial(sharded, driver, way, interface)
       for driver in ("hand", "cell") for way in HELD for interface in INTERFACES},
    "function_optimizer_AutoParallel": partial(sharded, "function", "optimizer"),
    **{f"model_optimizer_{interface}": partial(sharded, "model", "optimizer", interface) for interface in INTERFACES},
    "cell_semi_float16": partial(sharded, "cell", "semi", dtype=ms.float16),
    "hand_semi_bfloat16": partial(sharded, "hand", "semi", dtype=ms.bfloat16)}
CASES = {
    **SHARDED, "refused_inside_AutoParallel": partial(refused, inside, "AutoParallel"),
    **{f"refused_{name}_{interface}": partial(refused, train, interface)
       for name, train in REFUSED.items() for interface in INTERFACES}}
