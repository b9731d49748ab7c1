"""The page "Coming from elsewhere": its blocks with other libraries are exact. The notes have the record's figures.

MindCV is there. MindONE is not: what its block uses is written after its behaviour, with a learning rate that moves the
parameters by more than rounding. test_guide.py runs the other blocks.
"""
import json
import re
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.pages import PAGES, ROOT

import ms_accum
from ms_accum import make_train_step

N, ROWS = 4, (4, 2, 4, 2, 4, 4, 4)  # a window and an incomplete one, of as many rows; each size is compiled
FEATURES, CLASSES, IGNORED = 6, 8, -100


def normal(rng, *shape):
    return Tensor(rng.normal(size=shape), ms.float32)


def create_optimizer(parameters, name, lr):
    return nn.Momentum(parameters, 0.1, 0.9)


class EMA(nn.Cell):
    """MindONE's; it counts its updates."""

    def __init__(self, model):
        super().__init__()
        self.updates = Parameter(Tensor(0.0), name="updates", requires_grad=False)

    def ema_update(self):
        return ops.assign_add(self.updates, 1.0)


class Model(nn.Cell):
    """MindONE's: it shifts the labels, and returns a tuple."""

    def __init__(self):
        super().__init__()
        self.embed, self.read = nn.Embedding(CLASSES, FEATURES), nn.Dense(FEATURES, CLASSES)

    def construct(self, input_ids, labels, return_dict):
        logits = self.read(self.embed(input_ids))[:, :-1]
        return (ops.cross_entropy(logits.reshape((-1, CLASSES)), labels[:, 1:].reshape(-1), ignore_index=IGNORED),)


def vit():
    from mindcv.models.vit import VisionTransformer
    return VisionTransformer(image_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=5)


def yours(library):
    """The names that the page calls yours, the same each time. The longer microbatches have the shorter texts."""
    ms.set_seed(1)
    rng = np.random.default_rng(0)

    def integers(high, *shape):
        return rng.integers(0, high, shape).astype(np.int32)

    def sentence(rows):
        ids = integers(CLASSES, rows, 12)
        labels = np.where(np.arange(12) < (4 if rows == 4 else 12), ids, IGNORED)
        return {"input_ids": Tensor(ids), "labels": Tensor(labels)}

    return {
        "mindcv": lambda: {"network": vit(), "loss_fn": nn.CrossEntropyLoss(), "epochs": 1, "batches": [
            (normal(rng, rows, 3, 16, 16), Tensor(integers(5, rows))) for rows in ROWS]},
        "mindone": lambda: {"model": Model(), "batches": list(map(sentence, ROWS))},
    }[library]()


STAND_INS = {
    "mindone.trainers": SimpleNamespace(create_optimizer=create_optimizer),
    "mindone.trainers.ema": SimpleNamespace(EMA=EMA)}


class Plainly:
    """In place of `make_train_step`: train on what `weigh(gradients, microbatches)` makes of a window."""

    def __init__(self, weigh, forward_fn, optimizer, accumulate_step, clip_norm=None, **_):
        self.gradients = ms.grad(forward_fn, None, optimizer.parameters)
        self.weigh, self.optimizer, self.clip_norm, self.start = weigh, optimizer, clip_norm, weights(optimizer)

    def on_update(self, function):
        pass

    def epoch(self, batches):
        batches = [tuple(batch.values()) if isinstance(batch, dict) else batch for batch in batches]
        for i in range(0, len(batches), N):
            found = self.weigh(self.gradients, batches[i:i + N])
            self.optimizer(ops.clip_by_global_norm(found, self.clip_norm) if self.clip_norm else found)
        return ()


def undivided(gradients, window):
    return gradients(*map(ops.cat, zip(*window)))


def mean_of_means(gradients, window):
    each = [gradients(*batch) for batch in window]
    return tuple(sum(of_parameter) / len(window) for of_parameter in zip(*each))


def weights(optimizer):
    return np.concatenate([parameter.asnumpy().astype(np.float64).ravel() for parameter in optimizer.parameters])


def run_block(path, library, make_train_step):
    """The names of a block, and its weights, after it has trained with one way to make its train step."""
    module = ModuleType(path.stem)
    vars(module).update(yours(library))
    modules = {**STAND_INS, path.stem: module}  # a graph looks names up in a module
    with patch.dict(sys.modules, modules), patch.object(ms_accum, "make_train_step", make_train_step):
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), vars(module))
    return vars(module), weights(module.optimizer)


# --- the blocks -------------------------------------------------------------------------------------------------------

PAGE = PAGES["other-libraries"]
BLOCKS = {found: block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
          for found in re.findall(r"^from (mind\w+)\.", block, re.MULTILINE)[:1] if found != "mindspore"}


@pytest.mark.slow
@pytest.mark.parametrize("library", ["mindcv", "mindone"])
def test_the_block_of_a_library_is_exact(tmp_path, library):
    """A window of 4 and one of 3 uneven microbatches. Negative control: unweighted means train other weights."""
    if library == "mindcv":
        pytest.importorskip("mindcv", reason="needs MindCV: pip install '.[test]'")
    path = tmp_path / f"block_of_{library}.py"
    code = re.sub("clip_norm=[0-9.]+", "clip_norm=0.05", BLOCKS[library])  # gradients here are small
    path.write_text(code, encoding="utf-8")
    names, trained = run_block(path, library, make_train_step)
    assert names["train_step"].update_step == 2
    average = names["ema" if library == "mindone" else "average"]
    assert float(average.updates.asnumpy()) == 2
    plain, wanted = run_block(path, library, partial(Plainly, undivided))
    _, wrong = run_block(path, library, partial(Plainly, mean_of_means))
    moved = np.linalg.norm(wanted - plain["train_step"].start)
    assert moved > 1e-3
    assert np.linalg.norm(trained - wanted) <= 1e-5 * moved
    assert np.linalg.norm(wrong - wanted) >= 1e-2 * moved


# --- the figures ------------------------------------------------------------------------------------------------------

RECORD = json.loads((ROOT / "tutorials" / "benchmarks" / "records" / "neighbours.json").read_text(encoding="utf-8"))
NAMES = {"mindone": "MindONE", "mindcv": "MindCV", "mindyolo": "MindYOLO", "mindocr": "MindOCR"}


def line(row):
    """A row of the record as one of the page's table."""
    error = row["error"]
    if "raised" in row:
        theirs = f"fails: `{row['raised'].split(':')[0]}`"
    else:
        theirs = f"{error:.2g}" if error >= 1e-3 else f"{error:.0e}"
    calls = ", averaged {} times in {} updates".format(*row["calls"][::2]) if "calls" in row else ""
    ours = f"{row['ms_accum']:.0e}" if "ms_accum" in row else "-"
    data = row["data"].replace("rows", "samples")
    return f"| {NAMES[row['library']]} {row['call']} | {data} | {theirs}{calls} | {ours} |"


def test_the_notes_have_the_records_figures():
    """All lines but those of equal microbatches, which are the control: there, every library agrees."""
    equal = [row for row in RECORD["rows"] if row["data"] == "equal microbatches, full windows"]
    assert [row["library"] for row in equal] == list(NAMES)
    assert all(max(row["error"], row["ms_accum"]) <= 1e-6 for row in equal)
    notes = (ROOT / "tutorials" / "benchmarks" / "NOTES.md").read_text(encoding="utf-8")
    table = re.search(r"^\| library \|.*\n\|[-|]+\n((?:\|.*\n)+)", notes, re.MULTILINE)[1]
    assert table.splitlines() == [line(row) for row in RECORD["rows"] if row not in equal]
    assert all(row["ms_accum"] <= 1e-5 for row in RECORD["rows"] if "ms_accum" in row)
    assert all(f"{name} {RECORD['versions'][library]}" in notes for library, name in NAMES.items())
    assert RECORD["date"][:10] in notes
