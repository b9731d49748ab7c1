"""Checkpoints on another number of ranks: the window as a whole, what each rank gets of it, and what is refused."""
from pathlib import Path

import numpy as np
import pytest
import reference
from checkpointing import state
from conftest import MLP, batches, difference, mean_loss, tensors, values
from dealing import COUNTS, KINDS, build, rows_of, rows_of_all, save_as_four
from mindspore import nn

from ms_accum import (
    AdaptiveWindow,
    CheckpointError,
    LocalUpdates,
    TrainOneStepCell,
    checkpoint_file,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
    until_weight,
)
from ms_accum import checkpoint as checkpoint_module
from ms_accum.distributed.reducers import OneDevice
from ms_accum.resharding import Sharing, WholeWindow, dealt, gathered, why_not_shared, why_other_lengths
from ms_accum.window import Window

SHAPES = {"a": (3, 2), "b": (5,)}
PATH = Path("c.ckpt")


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch):
    monkeypatch.setenv("MS_JIT", "0")


# --- on arrays --------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "one": Sharing(1, 1, [], False, True), "window 2": Sharing(2, 1, [], True, True), "window 4": Sharing(4, 1, [], True, True),
    "flags 4": Sharing(4, 1, [], False, True), "microbatch 3": Sharing(3, 3, []), "shard 4": Sharing(4, 4, [[0, 1]]),
    "shard 3": Sharing(3, 3, [[0], [1]]), "nodes 4": Sharing(4, 2, [], True), "nodes-shard 6": Sharing(6, 3, [[1, 0]], True)}


def files_of(sharing, counts, unit_of=lambda rank: 1 + rank):
    """A file for each rank whose parties have so many microbatches; and the sums of all parties in the user's unit."""
    rng, files, totals = np.random.default_rng(0), [], {name: 0 for name in SHAPES}
    for party, count in enumerate(counts):
        unit = unit_of(party) if sharing.in_first_weight else 0
        sums = {name: rng.normal(size=shape).astype(np.float32) * (count > 0) for name, shape in SHAPES.items()}
        for name in SHAPES:
            totals[name] = totals[name] + sums[name] * (unit or 1)
        for place in range(sharing.party):
            entries = {"a": np.ones((3, 2), np.float32), "accumulator:mini_step": np.int32(count),
                       "accumulator:weight_sum": np.float32(10 * count), "accumulator:window_weight": np.float32(8),
                       "accumulator:weight_unit": np.float32(unit),
                       "accumulator:noise_scale.window": np.array([count, 2 * count], np.float32)}
            if sharing.buckets:
                for i, members in enumerate(sharing.buckets):
                    flat = np.concatenate([sums[list(SHAPES)[j]].reshape(-1) for j in members])
                    entries[f"accumulator:shard{i}"] = np.split(np.pad(flat, (0, -len(flat) % sharing.party)), sharing.party)[place]
            else:
                entries |= {f"accumulator:{name}": value for name, value in sums.items()}
            files.append(entries)
    return files, totals


def whole_of(files, sharing):
    return gathered(iter(files), sharing, SHAPES, 1)


@pytest.mark.parametrize("new", LAYOUTS)
@pytest.mark.parametrize("old", LAYOUTS)
def test_nothing_of_a_window_is_lost(old, new):
    """Sums, weights, microbatches and spreads are those of all files, in every pair of layouts."""
    saved, sharing = LAYOUTS[old], LAYOUTS[new]
    parties = saved.ranks // saved.party
    counts = [12 // saved.party] * parties if not saved.apart else [12 * (i + 1) // saved.party for i in range(parties)]
    files, totals = files_of(saved, counts)
    first, window = whole_of(files, saved)
    assert why_not_shared(window, sharing, "1000") is None
    again, of_all = whole_of([dealt(first, window, saved, sharing, rank) for rank in range(sharing.ranks)], sharing)
    assert window.microbatches == of_all.microbatches == sum(counts) * saved.party
    assert of_all.sums["accumulator:weight_sum"] == pytest.approx(10 * sum(counts), rel=1e-6)
    assert of_all.sums["accumulator:window_weight"] == pytest.approx(8 * parties, rel=1e-6)
    np.testing.assert_allclose(of_all.sums["accumulator:noise_scale.window"], [sum(counts), 2 * sum(counts)])
    unit = of_all.units[0] or 1
    got = [of_all.sums[f"accumulator:{name}"] * unit for name in SHAPES]
    assert difference(got, list(totals.values())) <= 1e-6
    assert (again["a"] == 1).all()
    if saved.in_first_weight and parties > 1:
        units = [entries.pop("accumulator:weight_unit") for entries in files]
        _, wrong = whole_of([entries | {"accumulator:weight_unit": units[0]} for entries in files], saved)
        assert difference([wrong.sums["accumulator:a"]], [totals["a"]]) > 0.1, "control: one unit for all"


@pytest.mark.parametrize("new", LAYOUTS)
def test_counts_fit_into_shorter_windows(new):
    """Parties differ by one at most, the first ones have more, and none has more than its window."""
    sharing = LAYOUTS[new]
    for length in range(1, 6):
        for microbatches in range(0, sharing.ranks * length, sharing.step):
            counts = sharing.counts(microbatches)
            assert sum(counts) * sharing.party == microbatches
            assert max(counts) <= length
            assert counts == sorted(counts, reverse=True)
            assert counts[0] - counts[-1] <= 1
            assert counts[-1] < length


def test_a_rank_without_microbatches_has_no_weight():
    saved, sharing = LAYOUTS["one"], LAYOUTS["window 4"]
    first, window = whole_of(files_of(saved, [2])[0], saved)
    entries = [dealt(first, window, saved, sharing, rank) for rank in range(4)]
    assert [int(each["accumulator:mini_step"]) for each in entries] == [1, 1, 0, 0]
    assert [float(each["accumulator:weight_sum"]) for each in entries] == [10, 10, 0, 0]


@pytest.mark.parametrize("driver", ["fused", "split", "cell"])
def test_a_full_share_is_closed_before_a_flush_exchanges_microbatches(driver, monkeypatch):
    """As a train step does; if one rank of a node trains and another one flushes, they would exchange different things."""
    monkeypatch.setenv("MS_JIT", "0")
    seen = []

    class Reducer(OneDevice):
        flushes_alone = False

        def microbatch(self, gradients, header):
            seen.append("microbatch")
            return gradients, header

        def window(self, buffers, unit, header):
            seen.append("window")
            return buffers, unit, header

    network, acc, _ = build(2)
    if driver == "cell":
        step = TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), acc)
    else:
        step = make_train_step(mean_loss(network), acc, strategy=driver)
    acc.add([p * 0 for p in acc.optimizer.parameters], 3.0)
    acc.add([p * 0 for p in acc.optimizer.parameters], 3.0)
    acc.reducer = Reducer(acc.reducer.layout)
    acc.reducer.each_microbatch = acc._count.loaded = True
    assert step.flush()
    assert seen[:2] == ["window", "microbatch"]
    assert [int(acc.update_step), int(acc.mini_step)] == [1, 0]


def test_an_equal_weight_stays_a_constant():
    """Sums without a unit get the mean weight of a microbatch, so that weight / unit is 1 where weights are equal."""
    saved, sharing = LAYOUTS["microbatch 3"], LAYOUTS["window 2"]
    files, totals = files_of(saved, [2])
    first, window = whole_of(files, saved)
    entries = dealt(first, window, saved, sharing, 0)
    assert entries["accumulator:weight_unit"] == np.float32(20 / 6)
    assert difference([entries["accumulator:a"] * (20 / 6)], [totals["a"]]) <= 1e-6
    files, _ = files_of(saved, [0])
    first, window = whole_of(files, saved)
    assert dealt(first, window, saved, sharing, 0)["accumulator:weight_unit"] == 0


def test_the_mean_over_ranks_of_a_sum_stays():
    """reduction="sum": the normaliser divides by the ranks, and the script by accumulate_step."""
    saved, sharing = Sharing(4, 1, [], True, averages=True), Sharing(2, 1, [], True, averages=True)
    files, totals = files_of(saved, [1, 1, 2, 2])
    first, window = whole_of(files, saved)
    mine = dealt(first, window, saved, sharing, 0)["accumulator:a"]
    assert difference([mine / 2], [totals["a"] / 4]) <= 1e-6
    assert not dealt(first, window, saved, sharing, 1)["accumulator:a"].any()


def test_buffers_of_several_losses_and_an_empty_rank():
    """Each loss has a unit of its own; a rank without microbatches saves only the buffers of the first."""
    saved, sharing = Sharing(2, 1, [], True, True), LAYOUTS["one"]

    def entries(count, units):
        found = {"accumulator:mini_step": np.int32(count), "accumulator:weight_sum": np.array([3, 5], np.float32),
                 "accumulator:window_weight": np.zeros(2, np.float32), "accumulator:weight_unit": np.float32(units[0]),
                 "accumulator:weight_unit2": np.float32(units[1]), "accumulator:x": np.full(2, count, np.float32)}
        return found | ({"accumulator:loss2.x": np.full(2, 10, np.float32)} if count else {})

    for files, second, unit in ([entries(1, (2, 4)), entries(3, (2, 8))], 30, 4), ([entries(0, (0, 0)), entries(3, (2, 8))], 10, 8):
        first, window = gathered(iter(files), saved, {"x": (2,)}, 2)
        whole = dealt(first, window, saved, sharing, 0)
        assert whole["accumulator:loss2.x"].tolist() == [second] * 2
        assert (whole["accumulator:weight_unit"], whole["accumulator:weight_unit2"]) == (2, unit)
        assert whole["accumulator:weight_sum"].tolist() == [6, 10]


def test_adaptive_lengths_are_those_of_a_rank():
    first = {"accumulator:window_chosen": np.int32(4), "accumulator:window_length": np.int32(8),
             "accumulator:window_weights": np.array([30, 5], np.float32)}
    nothing = WholeWindow({}, 0, {f"accumulator:{name}": np.float32(0) for name in ("weight_sum", "window_weight")}, [0.0])
    entries = dealt(first, nothing, Sharing(2, 1, []), Sharing(4, 1, []), 1)
    assert [int(entries[f"accumulator:window_{name}"]) for name in ("chosen", "length")] == [2, 4]
    assert entries["accumulator:window_weights"].tolist() == [30, 2.5]
    assert first["accumulator:window_weights"].tolist() == [30, 5]


def growing(update):
    return 2 * (update % 5 + 1)


@pytest.mark.parametrize(("saved", "ranks", "now", "ranks_now"), [
    (4, 4, 16, 1), (16, 1, 4, 4), (3, 2, 2, 3), ({0: 2, 10: 4}, 4, {0: 8, 10: 16}, 1), (until_weight(7), 4, until_weight(14), 2),
    (until_weight(1 / 3, 6), 4, until_weight(2 / 3, 12), 2), (until_weight(1e9, 6), 2, until_weight(2e9, 12), 1),
    (AdaptiveWindow(target=1e-5), 4, AdaptiveWindow(minimum=4, maximum=256, target=1e-5), 1),
    (AdaptiveWindow(minimum=2, maximum=8), 1, AdaptiveWindow(maximum=4), 2)], ids=lambda value: getattr(value, "__name__", str(value)))
def test_lengths_of_all_ranks_are_compared(saved, ranks, now, ranks_now):
    saved, now = Window(saved).describe(), Window(now).describe()
    assert why_other_lengths(saved, ranks, now, ranks_now) is None
    assert why_other_lengths(saved, ranks + 1, now, ranks_now) is not None, "control"


@pytest.mark.parametrize(("saved", "now", "give"), [
    (4, 8, "accumulate_step 4 on 4 ranks, but this run has 8 on 8; give accumulate_step=2, so that an update stands"),
    ({0: 2, 10: 4}, 2, "give accumulate_step={0: 1, 10: 2}, so"), ({0: 2, 10: 4}, {0: 1, 11: 2}, "give accumulate_step={0: 1, 10: 2}, so"),
    (until_weight(7), 2, "give accumulate_step=until_weight(3.5, at_most=2147483647), so"),
    (growing, 1, "give a function with lengths (1, 2, 3, 5, 4, "),
    (AdaptiveWindow(minimum=2, maximum=64, target=0.5), 2, "give accumulate_step=AdaptiveWindow(minimum=1, maximum=32, target=0.5), so"),
    (3, 2, "2 on 8, where a rank's windows would hold parts of microbatches; start 1, 2, 3, 4, 6 or 12 ranks"),
    (AdaptiveWindow(), 1, "where a rank's windows would hold parts of microbatches; start 1, 2 or 4 ranks"),
    (until_weight(7, 3), 1, "where a rank's windows would hold parts of microbatches; start 1, 2, 3, 4, 6 or 12 ranks"),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_other_lengths_are_refused_with_the_number_to_give(saved, now, give):
    assert give in why_other_lengths(Window(saved).describe(), 4, Window(now).describe(), 8)


def test_a_window_that_ranks_cannot_share_is_refused():
    window = WholeWindow({}, 6)
    assert why_not_shared(window, Sharing(4, 4, []), "2") == (
        "the open window holds 6 microbatches, which cannot be dealt out to 4 ranks that count them together; expected 1 or 2 ranks, "
        "or a closed window: save when train_step.updated is true")
    assert "to 4 ranks per node that count them together; expected 1, 2, 3 or 6 ranks per node" in why_not_shared(
        window, Sharing(8, 4, [], True), "until_weight(7, at_most=2147483647)")
    assert "to 4 ranks that count them together" in why_not_shared(window, LAYOUTS["flags 4"], "2")
    assert why_not_shared(window, Sharing(3, 3, []), "4") is None


# --- files of four ranks, in one process ------------------------------------------------------------------------------


def updated_once(rows):
    """The oracle's parameters after one update with all these rows as one batch."""
    oracle = reference.Accumulation(values(MLP(seed=0).trainable_params()), reference.SGD(0.1), 1, "mean", 0.5)
    x, y = map(np.concatenate, zip(*rows))
    oracle(reference.loss_and_gradients(oracle.parameters, x, y)[1])
    return oracle.parameters


def finished(more, accumulate_step=16, **options):
    """Parameters of one process that loads the files of four and fills the window with `more`."""
    network, acc, step = build(accumulate_step, seed=7, **options)
    load_checkpoint(PATH, network, acc)
    microbatches = int(acc.mini_step)
    for i, (x, y) in enumerate(more):
        assert int(acc.update_step) == 0
        step(*tensors(x, y))
        assert bool(step.updated) == (microbatches + i + 1 == accumulate_step)
    assert (int(acc.update_step), int(acc.mini_step)) == (1, 0)
    return values(network.trainable_params())


@pytest.mark.parametrize("sync", KINDS)
def test_four_ranks_go_on_in_one_process(sync):
    """The update is that of the undivided batch of all that was in the window and of what came after."""
    more = batches([2, 7, 1, 3, 4, 1, 2, 5])
    assert sum(COUNTS[sync]) == 8
    save_as_four(PATH, sync)
    expected = updated_once([*rows_of_all(sync), *more])
    assert difference(finished(more), expected) <= 1e-6
    for forget in (1, "unit") if sync == "window" else (1,):
        save_as_four(PATH, sync, forget=forget)
        assert difference(finished(more), expected) > 1e-4, f"control: without {forget}"


def test_the_unit_of_a_graph_that_ran_before():
    """A train step that ran before with another first weight goes on with its own unit."""
    save_as_four(PATH, "window")
    network, acc, step = build(16)
    step(*tensors(*batches([13])[0]))
    more = batches([2, 7, 1, 3, 4, 1, 2, 5])
    load_checkpoint(PATH, network, acc)
    for x, y in more:
        step(*tensors(x, y))
    assert difference(values(network.trainable_params()), updated_once([*rows_of_all("window"), *more])) <= 1e-6


def test_a_sum_is_the_mean_over_ranks():
    """The script divides by accumulate_step: 4 on four ranks, 16 in one process."""
    def build_sum(accumulate_step, seed=0, **_):
        network, acc, _ = build(accumulate_step, seed=seed, reduction="sum", clip_norm=None)
        grad_fn = mean_loss(network)

        def step(x, y):
            gradients = checkpoint_module.ms.grad(grad_fn, None, acc.optimizer.parameters)(x, y)
            acc(tuple([g / accumulate_step for g in gradients]))

        return network, acc, step

    save_as_four(PATH, "window", build=build_sum)
    network, acc, step = build_sum(16, seed=7)
    load_checkpoint(PATH, network, acc)
    more = batches([2, 7, 1, 3, 4, 1, 2, 5])
    for x, y in more:
        step(*tensors(x, y))
    parameters = values(MLP(seed=0).trainable_params())
    gradients = [reference.loss_and_gradients(parameters, x, y)[1] for x, y in [*rows_of_all("window"), *more]]
    expected = [p - 0.1 * sum(g) / 16 for p, g in zip(parameters, zip(*gradients))]
    assert int(acc.update_step) == 1
    assert difference(values(network.trainable_params()), expected) <= 1e-6


def test_extra_is_that_of_rank_0_and_a_closed_window_is_whole():
    save_as_four(PATH, "shard", counts=[0] * 4, extra={"done": 3})
    network, acc, step = build(16, seed=7)
    step(*tensors(*rows_of(0, 1)[0]))
    assert load_checkpoint(PATH, network, acc) == {"done": 3}
    assert int(acc.mini_step) == 0
    assert not any(buffer.asnumpy().any() for buffer in acc.buffers)
    assert difference(values(network.trainable_params()), values(MLP(seed=0).trainable_params())) == 0


def test_a_noise_scale_and_its_window_go_on():
    """Spreads of all ranks are in it, and the adaptive length of a rank is four times that of one of four."""
    more = batches([2, 7, 1, 3, 4, 1, 2, 5])
    save_as_four(PATH, "window", AdaptiveWindow(minimum=4, maximum=8))
    network, acc, step = build(AdaptiveWindow(minimum=16, maximum=32), seed=7)
    load_checkpoint(PATH, network, acc)
    assert acc.window_length == 16
    other, at_once, other_step = build(AdaptiveWindow(minimum=16, maximum=32))
    for x, y in rows_of_all("window"):
        other_step(*tensors(x, y))
    for x, y in more:
        step(*tensors(x, y))
        other_step(*tensors(x, y))
    assert difference(values(network.trainable_params()), values(other.trainable_params())) <= 1e-6
    assert int(acc.update_step) == int(at_once.update_step) == 1
    assert acc.noise_scale.noise == pytest.approx(at_once.noise_scale.noise, rel=1e-5)
    assert acc.noise_scale.gradient_squared == pytest.approx(at_once.noise_scale.gradient_squared, rel=1e-4)


def refused(message, accumulate_step=16, **options):
    network, acc, _ = build(accumulate_step, seed=7, **options)
    before = state(network, acc)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(PATH, network, acc)
    assert state(network, acc) == before


def test_what_cannot_be_dealt_out_is_refused_and_nothing_loaded():
    save_as_four(PATH, "shard")
    refused(r"c\.ckpt was saved with accumulate_step 4 on 4 ranks, but this run has 4 on 1; give accumulate_step=16, so", 4)
    refused(r"c\.ckpt was saved with clip_norm 0\.5, but this run has None; build it alike", clip_norm=None)
    other, acc = build(16)[:2]
    acc.optimizer.parameters[0].name = "renamed"
    with pytest.raises(CheckpointError, match=r"was saved with parameters \w{16}, but this run has \w{16}; build it alike"):
        load_checkpoint(PATH, other, acc)
    whole, (second,) = PATH.read_bytes(), Path().glob("c.rank2of4-*.ckpt")
    of_2 = second.read_bytes()
    second.write_bytes(of_2[:-1])
    refused(r"c\.rank2of4-\w+\.ckpt is (truncated|damaged)")
    second.write_bytes(whole)
    refused(r"c\.rank2of4-\w+\.ckpt does not belong to c\.ckpt; restore both from one copy")
    second.unlink()
    refused(r"there is no .*c\.rank2of4-\w+\.ckpt, but with another number of ranks each reads the files of all ranks that saved; put")
    save_as_four(PATH, "window", drop=["sharing"])
    refused(r"c\.ckpt can only be resumed on 4 ranks as they were \('sharing'\); start as many")

    def spoil(rank, entries, about):
        if rank == 2:
            entries["first.bias"] = entries["first.bias"] + 1

    save_as_four(PATH, "window", change=spoil)
    refused(r"resumed on 4 ranks as they were \(rank 2 and rank 0 saved different values of first\.bias\); start as many")

    def forget(rank, entries, about):
        del entries["accumulator:first.bias"]

    save_as_four(PATH, "window")
    refused(r"was saved with reducer WindowSync and ranks 4, but this run has LocalUpdates\(.*\) and 1; local updates need the same",
            reducer=LocalUpdates())
    save_as_four(PATH, "window", change=forget)
    refused(r"c\.ckpt has no entry accumulator:first\.bias, which this run needs")


def test_a_file_of_one_process_says_how_its_window_is_shared():
    network, acc, _ = build(4)
    save_checkpoint(PATH, network, acc)
    _, about = checkpoint_file.read_file(PATH)
    assert (about["version"], about["ranks"], about["sharing"]) == (2, 1, {"party": 1, "buckets": []})
