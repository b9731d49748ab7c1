"""Train a Case both ways and compare after each microbatch."""
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


def follow(case, folder):
    """Raise AssertionError where ms_accum and plain MindSpore disagree. Return how many arrays were compared."""
    following = _Follow(case, folder)
    try:
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

    def counters(self, facts, where, without=(), **more):
        """What is counted after a microbatch. `more`: what this run has more of."""
        got, expected = dict(facts["counters"]), self.plain.counters()
        for name, extra in more.items():
            expected[name] += extra
        seen = got.pop("seen"), expected.pop("seen")
        if "seen" not in without:
            self.equal(f"seen {where}", *seen, 0.5 + 1e-6 * seen[1])  # rounded when it is read
        expected = {name: value for name, value in expected.items() if name not in without}
        got = {name: got[name] for name in expected}
        assert got == pytest.approx(expected, rel=1e-6), where
        if facts["scaler"] is not None:
            assert facts["scaler"] == [self.plain.scale, self.plain.finite_windows], where
        norm = self.plain.grad_norm
        self.equal(f"grad_norm {where}", facts["grad_norm"], norm, self.tolerance * norm)

    def window(self, facts, where):
        """What a window changes."""
        self._parameters("", where, facts["parameters"], self.plain.parameters)
        got, expected = facts["state"], values(state_of(self.plain.optimizer))
        assert len(got) == len(expected)
        for i, (one, other) in enumerate(zip(got, expected)):
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

    def _parameters(self, what, where, got, expected):
        for one, other, p, path in zip(got, expected, self.plain.loss.trainable_params(), self.plain.path):
            self.equal(f"{what}{p.name} {where}", one, other, self._bound(p, path))

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
        self.position, self.over = 0, False

    def run(self):
        case = self.case
        self.plain, self.accumulating = Plain(case), Accumulating(case, case.seed)
        self.comparison = Comparison(case, self.plain)
        for end in sorted({case.error_at, case.save_at, len(case.sizes)} - {None}):
            if self.position < end:
                with self.accumulating.driver:
                    batches = [case.batch(i) for i in range(self.position, end)]
                    self.accumulating.train(batches, self._after, last=end == len(case.sizes))
            if self.over:
                return
            assert self.position >= end
            if end == case.error_at:
                self._error()
            if end == case.save_at:
                self._resume()
        self._flush()
        if not self.over:
            self.comparison.require_motion()
            # A run that was used before has its own unit of weights, and an error after the save resets it.
            alike = case.load_into == "fresh" and (case.error_at or 0) <= (case.save_at or 0)
            if case.save_at is not None and alike and case.optimizer not in LAST_BITS_VARY:
                self._require_same_bits()

    def _after(self, loss, aux):
        if self.over:
            return
        expected, others = self.plain.microbatch(self.case.batch(self.position))
        # It diverges: rounding decides where 16 bits overflow, and moves plain training itself by as much.
        if DIVERGED * self.case.factor < expected < np.inf:
            self.over = True
            return
        skipped, scale, said = self.plain.skipped, self.plain.scale, self.accumulating.said
        where = f"after microbatch {self.position}"
        comparison = self.comparison
        bound = comparison.tolerance * max(abs(expected), self.case.factor)
        comparison.equal(f"loss {where}", loss, expected, bound)
        for got, part in zip(aux, others, strict=self.case.aux):
            comparison.equal(f"aux {where}", got, part, 1e-6)
        self.position += 1
        if self.plain.full:
            self._close(where)
        asked = self.case.scaler is not None and self.case.driver.startswith(("cell", "model"))
        assert said == ([self.plain.skipped > skipped, scale] if asked else []), where
        self._compare_counters(where)
        self._between(where)

    def _between(self, where):
        """What a script does between microbatches: evaluate, which changes nothing, and set the rate."""
        trained, step = self.position - 1, self.accumulating.driver.step
        if trained == self.case.evaluate_at and (expected := self.plain.evaluated()) is not None:
            before = self.accumulating.bits(), self.accumulating.open_window(), repr(step.status()), step.updated
            bound = self.comparison.tolerance * max(abs(expected), self.case.factor)
            self.comparison.equal(f"evaluation {where}", self.accumulating.evaluate(self.case.evaluation()),
                                  expected, bound)
            after = self.accumulating.bits(), self.accumulating.open_window(), repr(step.status()), step.updated
            assert after == before, f"the evaluation {where} changes something"
        if trained == self.case.rate_at:
            rates = np.multiply(step.learning_rate, SLOWER).tolist()
            step.learning_rate = tuple(rates) if isinstance(rates, list) else rates
            assert step.learning_rate == pytest.approx(rates, rel=1e-6), where
            self.plain.multiply_rate(SLOWER)

    def _close(self, where):
        accumulator = self.accumulating.accumulator
        self.plain.close(dropped=int(accumulator.skipped) > self.plain.skipped)
        if self.plain.diverged:
            finite = all(np.isfinite(p.asnumpy()).all() for p in accumulator.optimizer.parameters)
            assert not finite, f"{where}: plain training has become NaN, but ms_accum has not"
            self.over = True
            return
        self.comparison.window(self.accumulating.facts(), where)

    def _compare_counters(self, where):
        if not self.over:  # pieces before an error end a row of skips
            without = () if self.case.error_at is None else ("skipped_in_row",)
            self.comparison.counters(self.accumulating.facts(), where, without)

    def _flush(self):
        with self.accumulating.driver as driver:
            assert driver.flush() == (self.plain.mini_step > 0 and driver.kind != "model"), "its callback has flushed"
        if self.plain.mini_step > 0:
            self._close("after the flush")
        self._compare_counters("after the flush")

    def _error(self):
        """A microbatch whose kernel raises: nothing of it counts, or everything is refused until a reset."""
        case, accumulating = self.case, self.accumulating
        before = accumulating.open_window()
        with accumulating.driver, pytest.raises((RuntimeError, ValueError)):
            accumulating.train([case.batch(case.error_at)])
        recover()
        with accumulating.driver as driver:
            if case.compiled:
                driver.build()
            if accumulating.open_window() != before or self._save_is_refused():
                with pytest.raises(RuntimeError, match="reset"):
                    accumulating.train([case.batch(case.error_at, spoil=False)])
                assert self._save_is_refused()
                accumulating.accumulator.reset()
                self.plain.reset()
        self.position = case.error_at + 1
        self._compare_counters("after the error")

    def _save_is_refused(self):
        try:
            self.accumulating.save(self.folder / "refused.safetensors", self.position)
        except RuntimeError:
            return True
        return False

    def _resume(self):
        path = self.folder / "run.safetensors"
        with self.accumulating.driver:
            self.accumulating.save(path, self.position)
        self.saved, self.saved_at = self.accumulating, self.position
        self.accumulating = Accumulating(self.case, self.case.seed + 1)
        with self.accumulating.driver:
            if self.case.load_into == "used":
                self.accumulating.train([self.case.batch(1, spoil=False)])
            assert self.accumulating.load(path) == self.position
        self._compare_counters("after the load")

    def _require_same_bits(self):
        """Of the run that was saved, which goes on, and of the one that it was loaded into."""
        with self.saved.driver as driver:
            self.saved.train([self.case.batch(i) for i in range(self.saved_at, len(self.case.sizes))], last=True)
            driver.flush()
        got, expected = self.accumulating.bits(), self.saved.bits()
        assert got.keys() == expected.keys()
        assert [name for name in expected if got[name] != expected[name]] == []
