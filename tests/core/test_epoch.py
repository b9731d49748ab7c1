"""An epoch that nobody iterates over, and one without a batch, are warned of at the user's line."""
from io import StringIO

import numpy as np
import pytest
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from support.modes import recorded_warnings
from support.training import sgd

from ms_accum import make_train_step
from ms_accum.selftest.networks import MLP, batches, mean_loss, tensors

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("uncompiled")]
BATCHES = [tensors(x, y) for x, y in batches([6, 6])]


def of_a_step(**options):
    network = MLP()
    return make_train_step(mean_loss(network), sgd(network), 2, **options)


def said(do):
    """What was warned of about epochs, and whether at a line of this file."""
    with recorded_warnings() as caught:
        do()
    return [(str(warning.message).partition(",")[0], warning.filename == __file__) for warning in caught
            if "nothing was trained" in str(warning.message)]


@pytest.mark.parametrize("build", [of_a_step, lambda: of_a_step(eager=True)])
def test_an_epoch_that_nobody_iterates_over_is_warned_of(build):
    """Control: not if one batch was trained, or the epoch was left."""
    driver = build()

    def forgotten():
        driver.epoch(BATCHES)

    def kept():
        epoch = driver.epoch(BATCHES)
        del epoch

    for do in (forgotten, kept):
        assert said(do) == [("nobody iterated over train_step.epoch(batches)", True)]
    assert said(lambda: next(driver.epoch(BATCHES))) == said(driver.epoch(BATCHES).close) == []
    driver.accumulator.reset()
    assert said(lambda: list(driver.epoch(BATCHES))) == []


@pytest.mark.parametrize("build", [of_a_step, lambda: of_a_step(eager=True)])
@pytest.mark.parametrize("empty", [list, lambda: iter(()), lambda: (x for x in ())])
def test_an_epoch_without_a_batch_is_warned_of(build, empty):
    """Control: not for an empty batch, which is one."""
    driver = build()
    assert said(lambda: [None for _ in driver.epoch(empty())]) == [("train_step.epoch(batches) got no batch", True)]
    assert said(lambda: list(driver.epoch(BATCHES[:1]))) == []
    assert said(lambda: list(driver.epoch([(np.zeros((0, 6), np.float32), np.zeros(0, np.int32))]))) == []


def test_an_epoch_that_is_resumed_after_its_last_batch_is_not_empty():
    train_step = of_a_step()
    train_step(*BATCHES[0])
    train_step.boundary.note_interrupted(train_step.boundary.loop)
    assert said(lambda: list(train_step.epoch(BATCHES[:1], resume=True))) == []
    assert train_step.updated


def test_an_epoch_has_the_length_of_its_batches():
    """Of a list, a dataset, and a generator, which has none; a progress bar shows it. It is the same to the end."""
    tqdm = pytest.importorskip("tqdm").tqdm
    x, y = (np.concatenate(column) for column in zip(*batches([6, 6, 3])))
    dataset = NumpySlicesDataset({"x": x.astype(np.float32), "y": y.astype(np.int32)}, shuffle=False).batch(6)
    for data, length in ((BATCHES, 2), (dataset, 3), (BATCHES[:1], 1)):
        driver = of_a_step()
        epoch = driver.epoch(data)
        lengths = [len(epoch), *(len(epoch) for _ in epoch), len(epoch)]
        epoch.close()
        assert lengths == [length] * (length + 2)
    for data, total in ((BATCHES, 2), ((batch for batch in BATCHES), None)):
        driver = of_a_step()
        bar = tqdm(driver.epoch(data), file=StringIO())
        assert bar.total == total
        assert len([*bar]) == bar.n == 2
        bar.iterable.close()
    epoch = of_a_step().epoch(batch for batch in BATCHES)
    with pytest.raises(TypeError, match=r"object of type 'generator' has no len\(\)"):
        len(epoch)
    assert epoch
    epoch.close()


def test_no_dataset_is_read_to_be_counted():
    """Control: MindSpore reads a generator, and what is filtered, to count them."""
    read = []

    def samples():
        for _ in range(12):
            read.append(1)
            yield np.ones(6, np.float32), np.int32(0)

    def keeps(x, y):
        read.append(1)
        return True

    source = NumpySlicesDataset({"x": np.ones((12, 6), np.float32), "y": np.zeros(12, np.int32)}, shuffle=False)
    for dataset in (GeneratorDataset(samples, ["x", "y"]).batch(6), source.filter(keeps).batch(6)):
        read.clear()
        epoch = of_a_step().epoch(dataset)
        with pytest.raises(TypeError, match="MindSpore would read the whole dataset to count its batches"):
            len(epoch)
        epoch.close()
        assert read == []
        assert dataset.get_dataset_size() == 2
        assert len(read) >= 12


def test_an_epoch_that_goes_on_has_the_length_of_the_rest():
    """Control: without `resume`, the length is the whole."""
    driver, data = of_a_step(), [*BATCHES, *BATCHES]
    for _, _ in zip(range(3), driver.epoch(data)):
        pass
    driver.boundary.note_interrupted(driver.boundary.loop)
    epoch = driver.epoch(data, resume=True)
    found = [len(epoch), *(len(epoch) for _ in epoch), len(epoch)]
    assert found == [1] * 3
    assert driver.status().update_step == 2
    for resume in (None, False):
        epoch = driver.epoch(data, resume=resume)
        assert len(epoch) == 4
        epoch.close()
