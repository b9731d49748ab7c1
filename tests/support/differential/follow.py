"""Train a Case both ways and compare after each microbatch."""
import csv
from contextlib import nullcontext

import numpy as np
import pytest

from ms_accum.selftest.comparing import values
from support.recovering import recover

from .accumulating import Accumulating
from .optimizers import LAST_BITS_VARY, state_of
from .plain import DIVERGED, Plain

# Relative to how far a parameter has moved. In 16 bits, pieces round differently from the whole; that is measured, too.
TOLERANCE = {"exact": 3e-5, "16 bit": 3e-2}
SLOWER = 0.3  # of a learning rate that is set
SAID = ("epoch", "microbatch", "update_step", "loss", "weight", "grad_norm", "skipped", "seen")  # by a row of a log


def follow(case, folder):
    """Raise AssertionError where ms_accum and plain MindSpore disagree. Return how many arrays were compared."""
    try:
        following = _Follow(case, folder)
        following.run()
    except BaseException:
        recover()
        raise
    return following.comparison.compared


class Comparison:
    """What a run is compared with."""

    def __init__(self, case, plain):
        self.case, self.plain = case, plain
        self.compared = 0

    @property
    def tolerance(self):
        return TOLERANCE["exact" if self.case.exact else "16 bit"] + 4 * self.plain.rounding

    def equal(self, what, got, expected, bound):
        """Fail where the difference is larger than the bound."""
        self.compared += 1
        got, expected = np.asarray(got, float), np.asarray(expected, float)
        with np.errstate(invalid="ignore"):
            off = np.abs(got - expected)
        close = (off <= bound) | (got == expected) | (np.isnan(got) & np.isnan(expected))
        if not close.all():
            worst = np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, np.where(close, 0.0, off))), close.shape)
            pytest.fail(f"{what}{[*map(int, worst)]}: got {got[worst]}, plain training has {expected[worst]}; "
                        f"allowed is a difference of {bound}")

    def status(self, facts, where, position, epochs):
        """What is counted, and the numbers of the last window. `position`: microbatches trained in this epoch."""
        got, plain = facts["status"], self.plain
        assert {name: got[name] for name in plain.counters()} == plain.counters(), where
        if not self.case.by_hand:
            assert (got["epochs"], got["trained"]) == (epochs, position), where
        self.equal(f"seen {where}", got["seen"], plain.weight_of_updates, 0.5 + 1e-6 * plain.weight_of_updates)
        assert got["weight"] == pytest.approx(plain.window_weight, rel=1e-6), where
        if facts["scaler"] is not None:
            assert facts["scaler"] == [plain.scale, plain.finite_windows], where
        if plain.grad_norm is not None:
            self.equal(f"grad_norm {where}", got["grad_norm"], plain.grad_norm, self.tolerance * plain.grad_norm)
        if not self.case.by_hand:
            self.loss(f"loss of the window {where}", got["loss"], plain.window_loss)

    def loss(self, what, got, expected):
        self.equal(what, got, expected, self.tolerance * max(abs(expected), self.case.factor))

    def window(self, facts, where):
        """What a window changes."""
        plain = self.plain
        for p, path, *pair in zip(plain.loss.trainable_params(), plain.path, facts["parameters"], plain.parameters):
            self.equal(f"{p.name} {where}", *pair, self._bound(p, path))
        got, expected = facts["state"], values(state_of(self.plain.optimizer))
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            # A moment of a small gradient among large ones has their rounding errors.
            largest = np.abs(other).max(initial=0.0)
            self.equal(f"state {i} of the optimizer {where}", one, other, 10 * self.tolerance * largest)
        if self.case.noise_scale:
            self._noise(where, facts["noise"])

    def require_motion(self):
        """Or the comparison says nothing."""
        if self.plain.update_step == 0:
            return
        moved = zip(self.plain.loss.trainable_params(), self.plain.path)
        bounds = [self._bound(p, path) / path for p, path in moved if path]
        assert min(bounds, default=1.0) < (1e-3 if self.case.exact else 0.3), f"too wide for the motion: {bounds}"

    def _bound(self, parameter, path):
        # What is lost when an update is added to the parameter, in all updates so far and on both sides.
        value = parameter.asnumpy()
        lost = np.finfo(value.dtype).eps * np.abs(value.astype(float)).max() * self.plain.update_step
        return self.tolerance * (path + 0.1 * max(self.plain.path)) + lost

    def _noise(self, where, measured):
        if all(len(window) < 2 for window in self.plain.measured):
            assert np.isnan(measured[0])
            return
        expected, size = self.plain.noise()
        self.equal(f"noise {where}", measured, expected, 10 * self.tolerance * size)


class _Follow:
    def __init__(self, case, folder):
        self.case, self.folder = case, folder
        self.position, self.epochs, self.over, self.alike, self.saved = 0, 0, False, True, None
        self.between = [(case.evaluate_at, self._evaluate), (case.rate_at, self._set_rate)]
        self.plain, self.accumulating = Plain(case), Accumulating(case, case.seed)
        self.comparison = Comparison(case, self.plain)
        self.rows, self.log = [], folder / "windows.csv"
        self.accumulating.log(self.log, self.rows)

    def run(self):
        events = [(self.case.error_at, self._error), (self.case.save_at, self._resume)]
        events = sorted(((at, act) for at, act in events if at is not None), key=lambda event: event[0])
        for end, act in (*events, (None, self._flush)):
            self._train(end)
            if self.over:
                return
            act()
        if not self.over:
            self.comparison.require_motion()
            if self.saved and self.alike and self.case.optimizer not in LAST_BITS_VARY:
                self._require_same_bits()

    def _train(self, end):
        if end is None or self.position < end:
            with self.accumulating.driver:
                self.accumulating.train(self.case.batches(), self.position, end, self._after)

    def _after(self, loss, aux):
        if self.over:
            return
        expected, others = self.plain.microbatch(self.case.batch(self.position))
        # It diverges: rounding decides where 16 bits overflow, and moves plain training itself by as much.
        if DIVERGED * self.case.factor < expected < np.inf:
            self.over = True
            return
        windows, scale, said = self.plain.closed_windows, self.plain.scale, self.accumulating.said
        where = f"after microbatch {self.position}"
        self.comparison.loss(f"loss {where}", loss, expected)
        for got, part in zip(aux, others, strict=self.case.aux):
            self.comparison.equal(f"aux {where}", got, part, 1e-6)
        self.position += 1
        trained, is_end = self.position, self.case.loops and self.position == len(self.case.sizes)
        if self.plain.full or (is_end and self.plain.mini_step):
            self._close(where)
        if is_end:
            self.position, self.epochs = 0, 1
        asked = self.case.scaler is not None and self.case.driver.startswith(("cell", "model"))
        dropped = self.plain.closed_windows > windows and self.plain.skipped_in_row > 0
        if not self.over:
            assert said == ([dropped, scale] if asked else []), where
        self._compare(where)
        due = [act for at, act in self.between if at == trained - 1]
        self.between = [(at, act) for at, act in self.between if act not in due]  # once, also if it is trained again
        for act in due:
            act(where)

    def _evaluate(self, where):
        """It changes nothing, at any time."""
        accumulating, step = self.accumulating, self.accumulating.driver.step
        if (expected := self.plain.evaluated()) is not None:
            before = accumulating.bits(), accumulating.open_window(), step.updated
            got = step.evaluate(map(accumulating.turned, self.case.evaluation()))
            self.comparison.loss(f"evaluation {where}", got, expected)
            after = accumulating.bits(), accumulating.open_window(), step.updated
            assert after == before, f"the evaluation {where} changes something"

    def _set_rate(self, where):
        step = self.accumulating.driver.step
        rates = np.multiply(step.learning_rate, SLOWER).tolist()
        step.learning_rate = tuple(rates) if isinstance(rates, list) else rates
        assert step.learning_rate == pytest.approx(rates, rel=1e-6), where
        self.plain.multiply_rate(SLOWER)

    def _close(self, where):
        self.plain.close(dropped=self.accumulating.boundary.status().skipped_in_row > 0)
        if self.plain.diverged:
            finite = all(np.isfinite(p.asnumpy()).all() for p in self.accumulating.optimizer.parameters)
            assert not finite, f"{where}: plain training has become NaN, but ms_accum has not"
            self.over = True
            return
        facts = self.accumulating.facts()
        self.comparison.window(facts, where)
        if self.case.logs:
            self._logged(facts["status"], where)

    def _logged(self, status, where):
        """A row for each update, whatever was loaded; a dropped window has none. It says what the status says."""
        assert [row["update_step"] for row in self.rows] == [*range(1, self.plain.update_step + 1)], where
        if self.plain.skipped_in_row == 0:
            said = {**status, "epoch": 1, "microbatch": self.position}
            np.testing.assert_equal({name: self.rows[-1][name] for name in SAID}, {name: said[name] for name in SAID})
            with self.log.open(newline="", encoding="utf-8") as file:
                written = [[line[name] for name in SAID] for line in csv.DictReader(file)]
            assert written == [[str(row[name]) for name in SAID] for row in self.rows], where

    def _compare(self, where):
        if not self.over:
            self.comparison.status(self.accumulating.facts(), where, self.position, self.epochs)

    def _flush(self):
        driver = self.accumulating.driver
        ends = driver.loops or driver.kind == "model"  # the epoch, which has flushed
        if not ends:
            with driver:
                assert driver.flush() == (self.plain.mini_step > 0)
        else:
            self.epochs = 1
        if self.plain.mini_step > 0:
            self._close("after the flush")
        self.position = 0 if ends else self.position
        self._compare("after the flush")

    def _error(self):
        """A microbatch whose kernel raises. Nothing of it counts; or it has to be reset, and its window begins again.

        By hand, that window is lost.
        """
        case, accumulating, at = self.case, self.accumulating, self.position
        before, held = accumulating.open_window(), self.plain.mini_step
        with accumulating.driver, pytest.raises((RuntimeError, ValueError)):
            accumulating.train(case.batches(failing_at=at), at, at + 1)
        recover()
        with accumulating.driver as driver:
            if case.compiled:
                driver.build()
            if accumulating.open_window() != before:
                with pytest.raises(RuntimeError, match="reset"):
                    accumulating.train(case.batches(), at, at + 1)
                driver.accumulator.reset()
                self.alike = self.alike and not (case.by_hand and self.saved)
                self.plain.reset()
                self._go_on()
                assert case.by_hand or self.position == at - held
        self._compare("after the error")

    def _go_on(self):
        """Where the open window began."""
        self.plain.begin()
        if not self.case.by_hand:
            self.position = self.accumulating.boundary.status().trained

    def _resume(self):
        """A file of an open window holds its beginning. By hand, there is none: that is an error."""
        path, held = self.folder / "run.safetensors", self.plain.mini_step
        with self.accumulating.driver as driver:
            if held and self.case.by_hand:
                with pytest.raises(RuntimeError, match="open window would be lost"):
                    self.accumulating.save(path, self.position)
                driver.flush()
                self._close("before the save")
                held = 0
            with pytest.warns(UserWarning, match="trained again") if held else nullcontext():
                self.accumulating.save(path, self.position)
        self.saved, self.saved_at = self.accumulating, self.position
        self.accumulating = Accumulating(self.case, self.case.seed + 1)
        with self.accumulating.driver as driver:
            if self.case.load_into == "used":
                driver(*self.accumulating.turned(self.case.batch(1, spoil=False)))
                self.alike = driver.kind not in ("cell", "model")  # a cell keeps its own unit of weights
            assert self.accumulating.load(path) == self.position
            self.accumulating.log(self.log, self.rows)
        self._go_on()
        assert self.position == self.saved_at - held
        self._compare("after the load")

    def _require_same_bits(self):
        """Of the run that was saved, which goes on, and of the one that it was loaded into."""
        with self.saved.driver as driver:
            self.saved.train(self.case.batches(), self.saved_at)
            driver.flush()
        got, expected = self.accumulating.bits(), self.saved.bits()
        assert got.keys() == expected.keys()
        assert [name for name in expected if got[name] != expected[name]] == []
