"""What is compiled in a dry run: each function trains in its own way. A process runs those that it is told to and reports in JSON.

The values of a dry run are 0, and so are the counters: what closes a window is called directly.
"""
import gc
import json
import sys
from contextlib import suppress
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops

from ms_accum import Accumulator, DataParallel, TrainOneStepCell, make_grad_cache_step, make_train_step
from ms_accum.batch_size import GradientNoiseScale
from ms_accum.boundary import Boundary
from ms_accum.straight import compiled

SIZE, LAYERS, ROWS = 64, 3, 16


class Network(nn.Cell):
    """`layers` times Dense, and the mean of what comes out. With `backwards`, the last layer is used first."""

    def __init__(self, dtype=ms.bfloat16, size=SIZE, layers=LAYERS, backwards=False):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(size, size, dtype=dtype) for _ in range(layers)])
        self.order = tuple(range(layers))[::-1 if backwards else 1]

    def construct(self, x):
        for i in self.order:
            x = self.layers[i](x)
        return x.astype(ms.float32).mean()


def rows(dtype=ms.bfloat16, size=SIZE, count=ROWS):
    return Tensor(np.zeros((count, size)), dtype)


def momentum(network):
    return nn.Momentum(network.trainable_params(), 1e-3, 0.9)


def decayed(network):
    return nn.AdamWeightDecay(network.trainable_params(), 1e-3)


def train(dtype=ms.bfloat16, optimizer=decayed, function=None, data=None, **options):
    """Compile what adds a microbatch, and all that closes a window."""
    network = Network(dtype)
    step = make_train_step(function(network) if function else network, optimizer(network), options.pop("accumulate_step", 2), **options)
    step(rows(dtype) if data is None else data)
    close(step.accumulator)
    return {}


def close(accumulator):
    boundary = Boundary(accumulator, compiled)
    boundary.close()
    if accumulator.guard.judges:
        compiled(updating(accumulator))()


def updating(accumulator):
    def update():
        accumulator.update_with(accumulator.reduced())
        return accumulator.update_step + 0

    return update


# --- every graph ----------------------------------------------------------------------------------------------------------------


def whole_float32():
    return train(ms.float32, momentum)


def whole_float16():
    return train(ms.float16)


def whole_bfloat16():
    return train()


def pieces():
    return train(pieces=3)


def alone():
    return train(accumulate_step=1)


def clipped():
    return train(clip_norm=1.0)


def skip_window():
    return train(on_nonfinite="skip_window")


def skip_microbatch():
    return train(on_nonfinite="skip_microbatch")


def loss_scaler():
    return train(ms.float16, loss_scaler=amp.DynamicLossScaler(2**10, 2, 100))


def amp_level():
    def mixed(network):
        return amp.auto_mixed_precision(network, "O2")

    return train(ms.float32, momentum, function=mixed)


def noise_scale():
    return train(noise_scale=GradientNoiseScale())


def token_weights():
    def weight(x):
        return (x != 0).sum().astype(ms.float32)

    return train(weight_fn=weight)


def several_losses():
    network = Network()

    def losses(x):
        loss = network(x)
        return loss, loss * 2

    step = make_train_step(losses, decayed(network), 1, losses=2)
    with suppress(RuntimeError):  # the counters stay 0
        step(rows())
    close(step.accumulator)
    return {}


def hand_step(network, optimizer):
    accumulator = Accumulator(optimizer, 2, 1.0, reduction="mean")
    grad_fn = ms.value_and_grad(network, None, optimizer.parameters)

    @ms.jit
    def step(x):
        loss, gradients = grad_fn(x)
        return loss, accumulator(gradients, 16.0)

    return step


def by_hand():
    network = Network()
    optimizer = decayed(network)
    step = hand_step(network, optimizer)

    step(rows())
    return {}


def op_by_op():
    network = Network(ms.float32)
    optimizer = momentum(network)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        accumulator = Accumulator(optimizer, 2, 1.0, reduction="mean")
        accumulator.add(tuple(Tensor(np.ones(p.shape), p.dtype) for p in optimizer.parameters), 4.0)
        accumulator.apply()
        ms.runtime.synchronize()
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
    return {}


def cell():
    network = Network()
    step = TrainOneStepCell(network, decayed(network), 2)
    step(rows())
    return {}


def grad_cache():
    tower = nn.Dense(SIZE, 8)

    def encode(x):
        return tower(x)

    def spread(representations):
        return ops.square(ops.matmul(representations, representations.T)).mean()

    step = make_grad_cache_step(encode, spread, nn.Momentum(tower.trainable_params(), 1e-3, 0.9), 2, pieces=2)
    data = rows(ms.float32)
    with suppress(ValueError):  # "the same in both passes" reads as 0, which stops it before the other pieces
        step(data)
    second = step.microbatch(step.prepared((data,), {})[0])._backward[ROWS // 2]
    second(Tensor(ROWS // 2, ms.int32), Tensor(np.zeros((ROWS, 8)), ms.float32), data)
    close(step.accumulator)
    return {}


def sgd_in_bfloat16():
    def sgd(network):
        return nn.SGD(network.trainable_params(), 1e-3)

    return train(optimizer=sgd)


# --- ranks ----------------------------------------------------------------------------------------------------------------------


def ranks(**options):
    from mindspore.communication import GlobalComm, init
    if not GlobalComm.INITED:
        init()
    # Whether the ranks are alike is asked of the device, which answers 0.
    return train(ms.float32, momentum, reducer=DataParallel(broadcast=False, **options))


def ranks_window():
    return ranks()


def ranks_microbatch():
    return ranks(sync="microbatch")


def ranks_shard():
    return ranks(sync="microbatch", shard=True)


# --- memory ---------------------------------------------------------------------------------------------------------------------


def peak(run, parameters):
    """Return bytes per parameter at the peak of the second call of `run`."""
    run()
    ms.runtime.synchronize()
    ms.runtime.reset_max_memory_allocated()
    run()
    ms.runtime.synchronize()
    return ms.runtime.max_memory_allocated() / parameters


def bytes_of(order="forward", optimizer=decayed, dtype=ms.bfloat16, **options):
    """Bytes per parameter at the peak of an addition and of an update: 13 layers of 512, a batch of 16 rows."""
    network = Network(dtype, 512, 13, backwards=order == "backwards")
    parameters = network.trainable_params()
    grouped = [{"params": parameters[1::2]}, {"params": parameters[::4]}, {"params": parameters[2::4]}]
    built = nn.AdamWeightDecay(grouped, 1e-3) if order == "groups" else optimizer(network)
    step = make_train_step(network, built, 4, **options)
    data, count = rows(dtype, 512), sum(p.size for p in parameters)
    before = ms.runtime.memory_allocated()
    add = peak(lambda: step(data), count)
    boundary = Boundary(step.accumulator, compiled)
    update = peak(boundary.close, count)
    return {"add": add - before / count, "update": update - before / count}


def memory_forward():
    return bytes_of()


def memory_backwards():
    return bytes_of("backwards")


def memory_groups():
    return bytes_of("groups")


def memory_momentum():
    return bytes_of(optimizer=momentum, dtype=ms.float32)


def memory_momentum_clipped():
    return bytes_of(optimizer=momentum, dtype=ms.float32, clip_norm=1.0)


def adam(network):
    return nn.Adam(network.trainable_params(), 1e-3)


def memory_adam():
    return bytes_of(optimizer=adam, dtype=ms.float32)


def memory_adam_clipped():
    return bytes_of(optimizer=adam, dtype=ms.float32, clip_norm=1.0)


def memory_decayed_clipped():
    return bytes_of(clip_norm=1.0)


def memory_by_hand():
    network = Network(ms.float32, 512, 13)
    optimizer = momentum(network)
    step = hand_step(network, optimizer)

    data, count = rows(ms.float32, 512), sum(p.size for p in optimizer.parameters)
    before = ms.runtime.memory_allocated()
    return {"update": peak(lambda: step(data), count) - before / count}


def memory_of_copies():
    """What it would be without multiplying and clearing in place."""
    from ms_accum import accumulator, buffers, in_place
    kept = in_place.in_place
    try:
        for module in (accumulator, buffers):
            module.in_place = lambda *_: in_place.Copying()
        return bytes_of(optimizer=momentum, dtype=ms.float32)
    finally:
        for module in (accumulator, buffers):
            module.in_place = kept


def memory_of_additions_in_turn():
    """What it would be with additions in the order of the parameters."""
    from ms_accum import buffers
    from ms_accum.gradients import mapped
    kept = buffers.Buffers.add
    try:
        buffers.Buffers.add = lambda self, gradients: mapped(buffers._add_in_turn, None, self.parameters, gradients)
        return bytes_of()
    finally:
        buffers.Buffers.add = kept


def main(folder, names):
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("Ascend")
    # With one thread, which MindSpore takes on a machine of two cores, a graph with a branch does not compile.
    ms.runtime.dispatch_threads_num(6)
    seen = set()
    for name in names:
        told = {"case": name}
        try:
            told["numbers"] = globals()[name]()
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
        files = set(Path(folder).glob("**/graph_build_*.ir")) - seen
        seen |= files
        print(json.dumps({**told, "files": sorted(map(str, files))}), flush=True)
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
