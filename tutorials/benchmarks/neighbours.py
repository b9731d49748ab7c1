"""Accumulate gradients with other MindSpore libraries and with ms_accum, and compare both with undivided batches.

Each row trains a small network of the library three times from the same weights: on the undivided batch of each window with plain
MindSpore, on its microbatches with the library's own accumulation, and on its microbatches with ms_accum. An error is the distance of the
trained parameters from those of the undivided batches, as a share of how far training moved them. Each row runs in a process of its own;
if the library raises an error, that is the row's result. Rows of libraries that are not installed are left out.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import mindspore as ms
import mint_on_cpu
import numpy as np
import records
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset

from ms_accum import avoid_busy_waiting, make_train_step

N = 4
RATE = 0.1
IGNORED = -100
COMMAND = "python tutorials/benchmarks/neighbours.py"
Window = list[tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
        network: Builds it.
        loss: `network -> Cell`, whose call is `(*microbatch) -> loss`: for undivided batches and the library.
        windows: Microbatches of each window: N of them, or fewer at the end of an epoch.
        options: For `make_train_step`.
        our_loss: The same for ms_accum, where it takes the loss in another form; it is then compared with undivided batches of that form.
        clip_norm: Of the gradient of a window.
        joined: Makes one batch of a window.
    """

    network: Callable[[], nn.Cell]
    loss: Callable[[nn.Cell], nn.Cell]
    windows: list[Window]
    options: dict
    our_loss: Callable[[nn.Cell], nn.Cell] | None = None
    clip_norm: float | None = None
    joined: Callable[[Window], tuple[np.ndarray, ...]] = lambda window: tuple(np.concatenate(column) for column in zip(*window))


Way = Callable[[Problem, nn.Cell, nn.Cell, nn.Optimizer], object]


# --- three ways to train ---------------------------------------------------------------------------------------------------


def undivided(problem: Problem, network: nn.Cell, loss: nn.Cell, optimizer: nn.Optimizer) -> None:
    """Train on one batch for each window."""
    def total(*batch):
        found = loss(*batch)
        return sum(found) if isinstance(found, tuple) else found

    gradients = ms.jit(ms.grad(total, None, network.trainable_params()))
    for window in problem.windows:
        found = gradients(*tensors(problem.joined(window)))
        optimizer(ops.clip_by_global_norm(found, problem.clip_norm) if problem.clip_norm else found)


def with_ms_accum(problem: Problem, network: nn.Cell, loss: nn.Cell, optimizer: nn.Optimizer) -> None:
    """Train on microbatches. An epoch ends with an incomplete window, or with the last one."""
    train_step = make_train_step(loss, optimizer, N, clip_norm=problem.clip_norm, **problem.options)
    for i, window in enumerate(problem.windows):
        for _ in train_step.epoch([tensors(microbatch) for microbatch in window]):
            pass
        assert int(train_step.accumulator.update_step) == i + 1


def each_microbatch(step: Callable, problem: Problem) -> None:
    """Give a library's step each microbatch."""
    for window in problem.windows:
        for microbatch in window:
            step(*tensors(microbatch))


def trained(problem: Problem, way: Way, loss: Callable, start: list[np.ndarray] | None = None) -> tuple[list[np.ndarray], object]:
    """Return the parameters after all windows, and what the way returned; without weights to start from, the weights of the network."""
    ms.set_seed(1)
    network = problem.network()
    network.set_train()
    parameters = network.trainable_params()
    if start is None:
        return values(parameters), None
    for parameter, value in zip(parameters, start):
        parameter.set_data(Tensor(value, parameter.dtype))
    more = way(problem, network, loss(network), nn.SGD(parameters, RATE))
    return values(parameters), more


def compare(problem: Problem, library: Way) -> dict:
    """Return the errors of a library and of ms_accum, and the first line of what the library raised."""
    start, _ = trained(problem, None, problem.loss)
    wanted, _ = trained(problem, undivided, problem.loss, start)
    our_loss = problem.our_loss or problem.loss
    ours_wanted = trained(problem, undivided, our_loss, start)[0] if problem.our_loss else wanted
    ours, _ = trained(problem, with_ms_accum, our_loss, start)
    found = {"error": None, "ms_accum": off(ours, ours_wanted, start)}
    try:
        theirs, more = trained(problem, library, problem.loss, start)
    except Exception as error:
        return {**found, "raised": said(error)}
    return {**found, "error": off(theirs, wanted, start), **(more or {})}


def off(found: list[np.ndarray], wanted: list[np.ndarray], start: list[np.ndarray]) -> float:
    """Return the distance as a share of the motion."""
    moved = np.sqrt(sum(np.square(b - a).sum() for a, b in zip(start, wanted)))
    assert moved > 1e-3, f"training moved the parameters by {moved:.1e}"
    return float(np.sqrt(sum(np.square(b - a).sum() for a, b in zip(found, wanted))) / moved)


def said(error: Exception) -> str:
    """Return the first line of an error, with its class."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def values(parameters: list) -> list[np.ndarray]:
    return [parameter.asnumpy().astype(np.float64) for parameter in parameters]


def tensors(batch: tuple[np.ndarray, ...]) -> list[Tensor]:
    return [Tensor(array) for array in batch]


# --- MindONE ---------------------------------------------------------------------------------------------------------------


class CausalLoss(nn.Cell):
    """The mean loss of a causal language model, over the tokens that it predicts."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def construct(self, input_ids, labels):
        return self.model(input_ids=input_ids, labels=labels, return_dict=False)[0]


def predicted_tokens(input_ids, labels):
    return (labels[:, 1:] != IGNORED).sum()


def llama() -> nn.Cell:
    from mindone.transformers import LlamaForCausalLM
    from transformers import LlamaConfig
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=16, attn_implementation="eager", use_cache=False))


def bert() -> nn.Cell:
    """A classifier: the Trainer refuses models that take `**kwargs`, as Llama does."""
    from mindone.transformers import BertForSequenceClassification
    from transformers import BertConfig
    return BertForSequenceClassification(BertConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16,
        num_labels=3, attn_implementation="eager"))


def sentences(*windows: list[int], shortest: int = 12) -> Problem:
    """Windows of microbatches with so many rows, of which the second half of the microbatches is `shortest` tokens long."""
    rng = np.random.default_rng(0)

    def microbatch(rows: int, length: int) -> tuple[np.ndarray, ...]:
        ids = rng.integers(0, 31, (rows, 12)).astype(np.int32)
        return ids, np.where(np.arange(12) < length, ids, IGNORED).astype(np.int32)

    made = [[microbatch(rows, shortest if i >= N / 2 else 12) for i, rows in enumerate(window)] for window in windows]
    return Problem(llama, CausalLoss, made, {"weight_fn": predicted_tokens})


def mindone_step(problem: Problem, network: nn.Cell, loss: nn.Cell, optimizer: nn.Optimizer) -> None:
    from mindone.trainers.train_step import TrainOneStepWrapper
    step = TrainOneStepWrapper(loss, optimizer, Tensor(1.0), drop_overflow_update=False, gradient_accumulation_steps=N)
    each_microbatch(step, problem)


def mindone_ema() -> dict:
    """The averages after two windows: with the library's step, with ms_accum, and updated after each undivided batch."""
    from mindone.trainers.ema import EMA
    from mindone.trainers.train_step import TrainOneStepWrapper
    problem = sentences(EVEN, EVEN)
    start, _ = trained(problem, None, problem.loss)

    def averaged(network):
        return EMA(network, ema_decay=0.9, updates=10_000)

    def found(ema):
        return {"averages": values(ema.ema_weight), "calls": int(ema.updates.asnumpy()) - 10_000}

    def plain(problem, network, loss, optimizer):
        ema = averaged(network)
        for window in problem.windows:
            undivided(Problem(problem.network, problem.loss, [window], {}), network, loss, optimizer)
            ema.ema_update()
        return found(ema)

    def theirs(problem, network, loss, optimizer):
        ema = averaged(network)
        step = TrainOneStepWrapper(loss, optimizer, Tensor(1.0), ema, drop_overflow_update=False, gradient_accumulation_steps=N)
        each_microbatch(step, problem)
        return found(ema)

    def ours(problem, network, loss, optimizer):
        ema = averaged(network)
        with_ms_accum(Problem(problem.network, problem.loss, problem.windows, {**problem.options, "after_update": ema.ema_update}),
                      network, loss, optimizer)
        return found(ema)

    wanted, library, mine = (trained(problem, way, problem.loss, start)[1] for way in (plain, theirs, ours))
    errors = [off(averages["averages"], wanted["averages"], start) for averages in (library, mine)]
    return {"error": errors[0], "ms_accum": errors[1], "calls": [library["calls"], mine["calls"], wanted["calls"]]}


def mindone_trainer(steps: int = N) -> dict:
    """Two updates by the Trainer, with so many gradient_accumulation_steps."""
    from mindone.transformers.trainer import Trainer
    from mindone.transformers.training_args import TrainingArguments
    rows = [{"input_ids": ids, "labels": ids[0] % 3} for ids in sentences([16]).windows[0][0][0]]

    def collated(rows):
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=steps, max_steps=2,
                                      save_strategy="no", report_to="none")
        trainer = Trainer(model=bert(), args=arguments, train_dataset=rows, data_collator=collated)
        try:
            trainer.train()
        except Exception as error:
            return {"error": None, "raised": said(error)}
        return {"error": None, "updates": trainer.state.global_step}


# --- MindCV ----------------------------------------------------------------------------------------------------------------


def vit() -> nn.Cell:
    from mindcv.models.vit import VisionTransformer
    return VisionTransformer(image_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=5)


def images(*windows: list[int], clip_norm: float | None = None) -> Problem:
    rng = np.random.default_rng(0)
    made = [[(rng.normal(size=(rows, 3, 16, 16)).astype(np.float32), rng.integers(0, 5, rows).astype(np.int32)) for rows in window]
            for window in windows]
    return Problem(vit, lambda network: nn.WithLossCell(network, nn.CrossEntropyLoss()), made, {}, clip_norm=clip_norm)


def mindcv_step(problem: Problem, network: nn.Cell, loss: nn.Cell, optimizer: nn.Optimizer) -> None:
    """As `create_trainer` builds it."""
    from mindcv.utils.train_step import TrainStep
    clip = {"clip_grad": True, "clip_value": problem.clip_norm} if problem.clip_norm else {}
    each_microbatch(TrainStep(loss, optimizer, Tensor(1.0), gradient_accumulation_steps=N, **clip), problem)


# --- MindYOLO --------------------------------------------------------------------------------------------------------------

BOXES = 5


class Detector(nn.Cell):
    """One level of three anchors and three classes: (rows, anchors, height, width, 4 + 1 + 3)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 4, has_bias=True)
        self.head = nn.Conv2d(8, 3 * 8, 1, has_bias=True)

    def construct(self, x):
        y = self.head(ops.tanh(self.stem(x)))
        rows, _, height, width = y.shape
        return (y.reshape((rows, 3, 8, height, width)).transpose((0, 1, 3, 4, 2)),)


def yolo_loss(**parts: float):
    from mindyolo.models.losses.yolov5_loss import YOLOv5Loss
    return YOLOv5Loss(anchor_t=4.0, label_smoothing=0.0, fl_gamma=0.0, cls_pw=1.0, obj_pw=1.0,
                      anchors=[[10, 13, 16, 30, 33, 23]], stride=[4], nc=3, **parts)


class YoloLoss(nn.Cell):
    """The library's loss, which it multiplies by the number of images."""

    def __init__(self, network, **parts):
        super().__init__()
        self.network, self.loss_fn = network, yolo_loss(**parts)

    def construct(self, images, targets):
        return self.loss_fn(self.network(images), targets, images)[0]


class YoloMeans(nn.Cell):
    """Its two means: over the boxes that match an anchor, and over the cells of all images."""

    def __init__(self, network):
        super().__init__()
        self.network, self.matched, self.everywhere = network, yolo_loss(box=0.05, cls=0.5, obj=0.0), yolo_loss(box=0.0, cls=0.0, obj=1.0)

    def construct(self, images, targets):
        found = self.network(images)
        return self.matched(found, targets, images)[0] / len(images), self.everywhere(found, targets, images)[0] / len(images)


class YoloMean(YoloLoss):
    """The loss of an image."""

    def construct(self, images, targets):
        return self.loss_fn(self.network(images), targets, images)[0] / len(images)


def detections(*windows: list[int], our_loss: Callable, clip_norm: float | None = None, **parts: float) -> Problem:
    rng = np.random.default_rng(0)

    def microbatch(rows: int, most: int) -> tuple[np.ndarray, ...]:
        targets = np.zeros((rows, BOXES, 6), np.float32)
        targets[..., 0] = np.arange(rows)[:, None]
        targets[..., 1] = -1
        for row in targets:
            count = rng.integers(1, most + 1)
            row[:count, 1:] = np.column_stack([
                rng.integers(0, 3, count), rng.uniform(0.1, 0.9, (count, 2)), rng.uniform(0.2, 0.9, (count, 2))])
        return rng.normal(size=(rows, 3, 32, 32)).astype(np.float32), targets

    made = [[microbatch(rows, BOXES if i % 2 else 1) for i, rows in enumerate(window)] for window in windows]
    return Problem(Detector, lambda network: YoloLoss(network, **parts), made, {}, our_loss, clip_norm, renumbered)


def renumbered(window: Window) -> tuple[np.ndarray, ...]:
    """One batch of a window, whose targets name the rows of that batch."""
    found, targets = (np.concatenate(column) for column in zip(*window))
    targets[..., 0] = np.arange(len(targets))[:, None]
    return found, targets


def matched_boxes() -> Callable:
    """Return a weight_fn for `YoloMeans`: how many boxes match an anchor, and how many images there are."""
    boxes = yolo_loss(box=1.0, cls=1.0, obj=1.0)

    def weight_fn(images, targets):
        shape = ops.zeros((len(images), 3, 8, 8, 8), ms.float32)
        return boxes.build_targets((shape,), targets)[4].astype(ms.float32).sum(), len(images)
    return weight_fn


def mindyolo_trainer(problem: Problem, network: nn.Cell, loss: nn.Cell, optimizer: nn.Optimizer) -> None:
    """Its Trainer. An incomplete window ends an epoch."""
    from mindyolo.utils.train_step_factory import create_train_step_fn, get_gradreducer, get_loss_scaler
    from mindyolo.utils.trainer_factory import create_trainer
    scaler, reducer = get_loss_scaler("none"), get_gradreducer(False, optimizer.parameters)
    step = create_train_step_fn("detect", network, loss.loss_fn, optimizer, 1.0, scaler, reducer, ms_jit=True,
                                clip_grad=bool(problem.clip_norm), clip_grad_value=problem.clip_norm or 1.0)
    microbatches = [microbatch for window in problem.windows for microbatch in window]
    epochs = sum(len(window) < N for window in problem.windows) or 1
    dataset = GeneratorDataset(microbatches, ["images", "labels"], shuffle=False)
    trainer = create_trainer("small", step, scaler, network, loss.loss_fn, ema=None, optimizer=optimizer, dataloader=dataset,
                             steps_per_epoch=len(microbatches) // epochs, callback=[], reducer=reducer, data_sink=False, profiler=None)
    trainer.train(epochs, main_device=False, accumulate=N, log_interval=1_000)


def mindyolo_boxes() -> dict:
    """Boxes differ. Beside `losses=2`, the mean loss weighed by images."""
    parts = {"box": 0.05, "cls": 0.5, "obj": 1.0}
    problem = detections(EVEN, EVEN, our_loss=YoloMeans, **parts)
    exact = compare(Problem(**{**vars(problem), "options": {"losses": 2, "weight_fn": matched_boxes()}}), mindyolo_trainer)
    by_images = compare(Problem(**{**vars(problem), "our_loss": lambda network: YoloMean(network, **parts)}), lambda *_: None)
    return {**exact, "by_images": by_images["ms_accum"]}


def of_cells(network: nn.Cell) -> nn.Cell:
    return YoloMean(network, **CELLS)


CELLS = {"box": 0.0, "cls": 0.0, "obj": 1.0}


# --- MindOCR ---------------------------------------------------------------------------------------------------------------

WIDTH, LETTERS, CLASSES = 10, 4, 8


def without_its_door(package: str) -> None:
    """Let modules of a package be imported whose `__init__` cannot be: MindOCR 0.5.0 needs a module that MindSpore 2.10 no longer has."""
    root = Path(find_spec(package).origin).parent
    for name in (package, f"{package}.utils", f"{package}.losses"):
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module


class Reader(nn.Cell):
    """Letters of columns: (rows, width, 6) to (width, rows, classes)."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(6, 16), nn.Dense(16, CLASSES)

    def construct(self, x):
        return self.second(ops.tanh(self.first(x))).transpose((1, 0, 2))


def ctc() -> nn.Cell:
    from mindocr.losses.rec_loss import CTCLoss

    class RaggedCTC(CTCLoss):
        """The library's loss for any number of rows up to its batch_size."""

        def construct(self, pred, label):
            lengths = self.sequence_length[:len(label)]
            loss, _ = self.ctc_loss(pred.astype(ms.float32), self.label_indices[:label.size], label.reshape((-1,)), lengths)
            return self.get_loss(loss)

    return RaggedCTC(WIDTH, LETTERS, batch_size=64)


def words(*windows: list[int]) -> Problem:
    rng = np.random.default_rng(0)
    made = [[(rng.normal(size=(rows, WIDTH, 6)).astype(np.float32), rng.integers(0, CLASSES - 1, (rows, LETTERS)).astype(np.int32))
             for rows in window] for window in windows]
    return Problem(Reader, lambda network: nn.WithLossCell(network, ctc()), made, {})


def mindocr_step(problem: Problem, network: nn.Cell, loss: nn.Cell, optimizer: nn.Optimizer) -> None:
    from mindocr.utils.train_step_wrapper import TrainOneStepWrapper
    step = TrainOneStepWrapper(loss, optimizer, Tensor(1.0), drop_overflow_update=False, gradient_accumulation_steps=N)
    each_microbatch(step, problem)


# --- the rows --------------------------------------------------------------------------------------------------------------

RAGGED, EVEN, THREE = [8, 2, 5, 1], [4] * N, [4] * 3
WRAPPER = "`TrainOneStepWrapper`"
EQUAL = "equal microbatches, full windows"
ROWS_DIFFER, TOKENS_DIFFER = "microbatches of 8, 2, 5 and 1 rows", "microbatches of 44, 44, 8 and 8 tokens"
CLIPPED, LAST = "clipped gradients", "a last window of 3"


@dataclass(frozen=True)
class Row:
    """A library's call, on what, in which mode, and what measures it."""

    library: str
    call: str
    data: str
    measure: Callable[[], dict]
    mode: int = ms.GRAPH_MODE


ROWS = [
    Row("mindone", WRAPPER, EQUAL, lambda: compare(sentences(EVEN, EVEN), mindone_step)),
    Row("mindone", WRAPPER, ROWS_DIFFER, lambda: compare(sentences(RAGGED, RAGGED), mindone_step)),
    Row("mindone", WRAPPER, TOKENS_DIFFER, lambda: compare(sentences(EVEN, EVEN, shortest=3), mindone_step)),
    Row("mindone", WRAPPER, LAST, lambda: compare(sentences(EVEN, THREE), mindone_step)),
    Row("mindone", f"{WRAPPER}, `EMA`", "averaged weights", mindone_ema),
    Row("mindone", "`Trainer`", "`gradient_accumulation_steps=4`", mindone_trainer, ms.PYNATIVE_MODE),
    Row("mindcv", "`TrainStep`", EQUAL, lambda: compare(images(EVEN, EVEN), mindcv_step)),
    Row("mindcv", "`TrainStep`", ROWS_DIFFER, lambda: compare(images(RAGGED, RAGGED), mindcv_step)),
    Row("mindcv", "`TrainStep`", CLIPPED, lambda: compare(images(EVEN, EVEN, clip_norm=0.3), mindcv_step)),
    Row("mindcv", "`TrainStep`", LAST, lambda: compare(images(EVEN, THREE), mindcv_step)),
    Row("mindcv", "`TrainStep`", "PyNative", lambda: compare(images(EVEN, EVEN), mindcv_step), ms.PYNATIVE_MODE),
    Row("mindyolo", "`Trainer`", EQUAL, lambda: compare(detections(EVEN, EVEN, our_loss=of_cells, **CELLS), mindyolo_trainer)),
    Row("mindyolo", "`Trainer`", ROWS_DIFFER, lambda: compare(detections(RAGGED, RAGGED, our_loss=of_cells, **CELLS), mindyolo_trainer)),
    Row("mindyolo", "`Trainer`", "images of 1 to 5 boxes", mindyolo_boxes),
    Row("mindyolo", "`Trainer`", CLIPPED, lambda: compare(
        detections(EVEN, EVEN, our_loss=of_cells, clip_norm=0.3, **CELLS), mindyolo_trainer)),
    Row("mindyolo", "`Trainer`", "two epochs of 7 microbatches", lambda: compare(
        detections(EVEN, THREE, EVEN, THREE, our_loss=of_cells, **CELLS), mindyolo_trainer)),
    Row("mindocr", WRAPPER, EQUAL, lambda: compare(words(EVEN, EVEN), mindocr_step)),
    Row("mindocr", WRAPPER, ROWS_DIFFER, lambda: compare(words(RAGGED, RAGGED), mindocr_step)),
    Row("mindocr", WRAPPER, LAST, lambda: compare(words(EVEN, THREE), mindocr_step)),
]


def measured(row: Row) -> dict:
    """Measure a row in this process."""
    avoid_busy_waiting()
    ms.set_context(mode=row.mode)
    if row.library == "mindone":
        mint_on_cpu.install()
    if row.library == "mindocr":
        without_its_door("mindocr")
    return row.measure()


def in_a_process(i: int) -> dict:
    """Measure a row in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--row", str(i)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"row {i}, {ROWS[i].library}, {ROWS[i].data}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


NAMES = {"mindone": "MindONE", "mindcv": "MindCV", "mindyolo": "MindYOLO", "mindocr": "MindOCR"}


def line(row: dict) -> str:
    """Return a row as one of the guide's table."""
    theirs = f"fails: `{row['raised'].split(':')[0]}`" if "raised" in row else shown(row["error"])
    calls = ", averaged {} times in {} updates".format(*row["calls"][::2]) if "calls" in row else ""
    ours = f"{row['ms_accum']:.0e}" if "ms_accum" in row else "-"
    return f"| {NAMES[row['library']]} {row['call']} | {row['data']} | {theirs}{calls} | {ours} |"


def shown(error: float) -> str:
    return f"{error:.2g}" if error >= 1e-3 else f"{error:.0e}"


def main(arguments: list[str]) -> None:
    """Measure the rows, print them, write the record; its last line is JSON."""
    parser = argparse.ArgumentParser(prog="neighbours.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    libraries = list(dict.fromkeys(row.library for row in ROWS))
    parser.add_argument("--only", choices=libraries, help="the rows of one library; without --output, no record is written")
    parser.add_argument("--output", type=Path, metavar="DIR",
                        help="folder of the record, neighbours.json (default: records/ beside this file)")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row is not None:
        print(json.dumps(measured(ROWS[options.row])))
        return
    there = [name for name in libraries if find_spec(name) and options.only in (None, name)]
    for name in libraries:
        if name not in there and options.only in (None, name):
            print(f"{name} is not installed: left out (pip install '.[ecosystem]')", file=sys.stderr)
    rows = []
    for i, row in enumerate(ROWS):
        if row.library in there:
            rows.append({"library": row.library, "call": row.call, "data": row.data, **in_a_process(i)})
            print(line(rows[-1]), flush=True)
    record = {**records.make("neighbours", False, COMMAND, []), "accumulate_step": N, "rows": rows}
    record["versions"].update({name: found for name in (*there, "transformers") if (found := installed(name))})
    file = options.output or (None if options.only else records.FOLDER)
    if file:
        records.write(record, file / "neighbours.json")
    print(json.dumps({"suite": "neighbours", "record": file and "neighbours.json", "rows": rows}))


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
