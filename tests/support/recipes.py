"""Run a block of the page "With other libraries" on a small network of its library, and compare it with undivided batches.

    python recipes.py BLOCK NETWORK

The block gets what it calls yours (`model` or `network`, `loss_fn`, `batches` of uneven sizes, …) and has to define `train_step`.
The last line printed has two distances from plain training on the undivided batch of each window, as shares of the motion:
of the block's parameters, and of those that unweighted means of the microbatches' gradients train.
"""
import json
import sys
import types
from pathlib import Path

import mindspore as ms
import mint_on_cpu
import neighbours
import numpy as np
from mindspore import Tensor, nn, ops

import ms_accum

N, ROWS = 4, (8, 2, 5, 1, 3, 4, 6)
RECORDED = {}


def recorded(forward_fn, optimizer, accumulate_step, **options):
    """`make_train_step`, and keep what it got and all values it starts from."""
    RECORDED.update(forward_fn=forward_fn, optimizer=optimizer, clip_norm=options.get("clip_norm"), has_aux=options.get("has_aux", False),
                    weight_fn=options.get("weight_fn"), start=state(optimizer))
    return MAKE(forward_fn, optimizer, accumulate_step, **options)


MAKE, ms_accum.make_train_step = ms_accum.make_train_step, recorded


def state(optimizer):
    """Copies of weights and of the optimizer's own values."""
    found = {id(parameter): parameter for parameter in (*optimizer.parameters, *optimizer.get_parameters())}
    return [(parameter, parameter.asnumpy().copy()) for parameter in found.values()]


def restored():
    for parameter, value in RECORDED["start"]:
        ops.assign(parameter, Tensor(value, parameter.dtype))


def weights():
    return [parameter.asnumpy().astype(np.float64) for parameter in RECORDED["optimizer"].parameters]


def plainly_trained(batches, weigh):
    """The weights after updates by `weigh(microbatches) -> gradients` of each window."""
    restored()
    optimizer, clip_norm = RECORDED["optimizer"], RECORDED["clip_norm"]
    for i in range(0, len(batches), N):
        found = weigh([positional(batch) for batch in batches[i:i + N]])
        optimizer(ops.clip_by_global_norm(found, clip_norm) if clip_norm else found)
    return weights()


def positional(batch):
    return tuple(batch.values()) if isinstance(batch, dict) else batch


def checked(batches):
    """Print the distances. The block has trained."""
    found = weights()
    forward_fn, parameters = RECORDED["forward_fn"], RECORDED["optimizer"].parameters
    gradient = ms.jit(ms.grad(forward_fn, None, parameters, has_aux=RECORDED["has_aux"]))

    def gradients(batch):
        return gradient(*batch)[0] if RECORDED["has_aux"] else gradient(*batch)

    def undivided(window):
        return gradients(tuple(ops.cat(column) for column in zip(*window)))

    def mean_of_means(window):
        each = [gradients(batch) for batch in window]
        return tuple(sum(of_parameter) / len(window) for of_parameter in zip(*each))

    wanted = plainly_trained(batches, undivided)
    wrong = plainly_trained(batches, mean_of_means)
    restored()
    start = weights()
    print(json.dumps([neighbours.off(found, wanted, start), neighbours.off(wrong, wanted, start)]))


# --- what the blocks call yours --------------------------------------------------------------------------------------------


def sentences(model):
    made = neighbours.sentences(ROWS[:N], ROWS[N:], shortest=4).windows
    batches = [dict(zip(("input_ids", "labels"), neighbours.tensors(microbatch))) for window in made for microbatch in window]
    return {"model": model, "batches": batches}


def gpt2():
    from mindone.transformers import GPT2LMHeadModel
    from transformers import GPT2Config
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=1, n_head=2, attn_implementation="eager", use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0))


def microbatches(problem):
    return [tuple(neighbours.tensors(microbatch)) for window in problem.windows for microbatch in window]


GIVEN = {
    "llama": lambda: sentences(neighbours.llama()),
    "gpt2": lambda: sentences(gpt2()),
    "vit": lambda: {"network": neighbours.vit(), "loss_fn": nn.CrossEntropyLoss(), "epochs": 1,
                    "batches": microbatches(neighbours.images([7, 2, 7, 2], [2, 7, 2]))},  # each size is compiled
    "detector": lambda: {"network": neighbours.Detector(), "loss_fn": neighbours.yolo_loss(**neighbours.CELLS),
                         "batches": microbatches(neighbours.detections(ROWS[:N], ROWS[N:], our_loss=None))},
    "reader": lambda: {"network": neighbours.Reader(), "batches": microbatches(neighbours.words(ROWS[:N], ROWS[N:])),
                       "width": neighbours.WIDTH, "letters": neighbours.LETTERS},
}

if __name__ == "__main__":
    block, name = sys.argv[1:]
    mint_on_cpu.install()
    if name == "reader":
        neighbours.without_its_door("mindocr")
    ms.set_seed(1)
    module = sys.modules["block"] = types.ModuleType("block")  # a graph looks names up in a module
    vars(module).update(GIVEN[name]())
    exec(compile(Path(block).read_text(encoding="utf-8"), block, "exec"), vars(module))
    assert int(module.train_step.accumulator.update_step) == 2
    averages = [getattr(module, name).updates for name in ("ema", "average") if hasattr(module, name)]
    assert [float(updates.asnumpy()) for updates in averages] == [2.0] * len(averages)
    checked(module.batches)
    del nn.Cell.__del__  # it uses modules that are gone when the interpreter exits
