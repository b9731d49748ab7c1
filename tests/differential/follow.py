"""Train a Case both ways and compare after each microbatch."""
import numpy as np
import pytest
from conftest import recover

from .drivers import Accumulating
from .optimizers import state_of
from .plain import Plain

# Relative to how far a parameter has moved. In 16 bits, pieces of a batch round differently from the whole; how much is measured, too.
TOLERANCE = {"exact": 3e-5, "16 bit": 3e-2}


def follow(case, folder):
    """Raise AssertionError where ms_accum and plain MindSpore disagree. Return how many arrays were compared."""
    following = _Follow(case, folder)
    try:
        following.run()
    except BaseException:
        recover()
        raise
    return following.compared


class _Follow:
    def __init__(self, case, folder):
        self.case, self.folder = case, folder
        self.position = self.compared = 0
        self.over = False

    def run(self):
        case = self.case
        self.plain = Plain(case)
        self.accumulating = Accumulating(case, case.seed)
        self.start = [p.asnumpy().copy() for p in self.plain.loss.trainable_params()]
        for end in sorted({case.error_at, case.save_at, len(case.sizes)} - {None}):
            if self.position < end:
                with self.accumulating:
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
            self._require_motion()
            # A run that was used before has its own unit of weights, and an error after the save resets it.
            if case.save_at is not None and case.load_into == "fresh" and (case.error_at or 0) <= case.save_at:
                self._require_same_bits()

    @property
    def tolerance(self):
        return TOLERANCE["exact" if self.case.exact else "16 bit"] + 4 * self.plain.rounding

    def _after(self, loss, aux):
        if self.over:
            return
        expected, full = self.plain.microbatch(self.case.batch(self.position))
        where = f"after microbatch {self.position}"
        self._equal(f"loss {where}", loss, expected, self.tolerance * np.maximum(np.abs(expected), self.case.factor))
        for got, part in zip(aux, self.plain.aux):
            self._equal(f"aux {where}", got, part, 1e-6)
        self.position += 1
        # Of a window that was weighed before, the end of the data is known, too.
        if full or (self.case.ahead and self.position == len(self.case.sizes)):
            self._close(where)
        self._compare_counters(where)

    def _close(self, where):
        accumulator = self.accumulating.accumulator
        self.plain.close(dropped=int(accumulator.skipped) > self.plain.skipped)
        if self.plain.diverged:
            finite = all(np.isfinite(p.asnumpy()).all() for p in accumulator.optimizer.parameters)
            assert not finite, f"{where}: plain training has become NaN, but ms_accum has not"
            self.over = True
            return
        self._compare_parameters(where)
        self._compare_state(where)
        if self.case.hook:
            for got, expected, p, path in zip(self.accumulating.hook.averages, self.plain.averages, self.plain.loss.trainable_params(),
                                              self.plain.path):
                self._equal(f"average of {p.name} {where}", got.asnumpy(), expected, self._bound(p, path))
        if self.case.noise_scale:
            self._compare_noise(where)

    def _flush(self):
        with self.accumulating:
            closed = self.accumulating.flush()
            assert closed == (self.plain.mini_step > 0 and not self.case.driver.startswith("model")), "a model's callback has flushed"
        if self.plain.mini_step > 0:
            self._close("after the flush")
        self._compare_counters("after the flush")

    def _error(self):
        """A microbatch whose kernel raises: nothing of it counts, or everything is refused until a reset."""
        case, accumulator = self.case, self.accumulating.accumulator
        before = _open_window(accumulator)
        with self.accumulating, pytest.raises((RuntimeError, ValueError)):
            self.accumulating.train([case.batch(case.error_at)], _ignored)
        recover()
        with self.accumulating:
            if case.compiled:
                self.accumulating.build_step()
            if _open_window(accumulator) != before or self._save_is_refused():
                with pytest.raises(RuntimeError, match="reset"):
                    self.accumulating.train([case.batch(case.error_at, spoil=False)], _ignored)
                assert self._save_is_refused()
                accumulator.reset()
                self.plain.mini_step, self.plain.window = 0, []
        self.position = case.error_at + 1
        self._compare_counters("after the error")

    def _save_is_refused(self):
        try:
            self.accumulating.save(self.folder / "refused.ckpt", self.position)
        except RuntimeError:
            return True
        return False

    def _resume(self):
        path = self.folder / "run.ckpt"
        with self.accumulating:
            self.accumulating.save(path, self.position)
        self.saved, self.saved_at, self.accumulating = self.accumulating, self.position, Accumulating(self.case, self.case.seed + 1)
        with self.accumulating:
            if self.case.load_into == "used":
                self.accumulating.train([self.case.batch(1, spoil=False)], _ignored)
            assert self.accumulating.load(path) == self.position
        self.accumulating.calls = self.saved.calls
        self._compare_counters("after the load")

    def _require_same_bits(self):
        """Of the run that was saved, which goes on, and of the one that it was loaded into."""
        with self.saved:
            self.saved.train([self.case.batch(i) for i in range(self.saved_at, len(self.case.sizes))], _ignored, last=True)
            self.saved.flush()
        got, expected = self.accumulating.bits(), self.saved.bits()
        assert got.keys() == expected.keys()
        assert [name for name in expected if got[name] != expected[name]] == []

    # --- what is compared ----------------------------------------------------------------------------------------------------

    def _equal(self, what, got, expected, bound):
        self.compared += 1
        got, expected = np.asarray(got, float), np.asarray(expected, float)
        with np.errstate(invalid="ignore"):
            off = np.abs(got - expected)
        close = (off <= bound) | (got == expected) | (np.isnan(got) & np.isnan(expected))
        if not close.all():
            worst = np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, np.where(close, 0.0, off))), close.shape)
            pytest.fail(f"{what}{[*map(int, worst)]}: got {got[worst]}, plain training has {expected[worst]}; "
                        f"allowed is a difference of {bound}")

    def _compare_counters(self, where):
        if self.over:
            return
        accumulator, plain = self.accumulating.accumulator, self.plain
        for name in ("mini_step", "update_step", "skipped", "closed_windows"):
            assert int(getattr(accumulator, name)) == getattr(plain, name), f"{name} {where}"
        for name in ("weight_sum", "window_weight"):
            expected = getattr(plain, name)
            self._equal(f"{name} {where}", getattr(accumulator, name).asnumpy(), expected, 1e-6 * expected)
        if self.case.scaler is not None:
            scaler = self.accumulating.scaler
            assert (float(scaler.scale_value), int(getattr(scaler, "counter", 0))) == (plain.scale, plain.finite_windows), where
        self._equal(f"grad_norm {where}", float(accumulator.grad_norm), plain.grad_norm, self.tolerance * plain.grad_norm)

    def _compare_parameters(self, where):
        pairs = zip(self.accumulating.loss.trainable_params(), self.plain.loss.trainable_params(), self.plain.path)
        for got, expected, path in pairs:
            bound = self._bound(expected, path)
            self._equal(f"{expected.name} {where}", got.asnumpy(), expected.asnumpy(), bound)

    def _bound(self, parameter, path):
        # What is lost when an update is added to the parameter, in all updates so far and on both sides.
        values = parameter.asnumpy()
        lost = np.finfo(values.dtype).eps * np.abs(values.astype(float)).max() * self.plain.update_step
        return self.tolerance * (path + 0.1 * max(self.plain.path)) + lost

    def _compare_state(self, where):
        got, expected = state_of(self.accumulating.optimizer), state_of(self.plain.optimizer)
        assert len(got) == len(expected)
        got, expected = [[np.array(s.asnumpy(), np.float64) for s in state] for state in (got, expected)]
        for i, (one, other) in enumerate(zip(got, expected)):
            # A moment of a small gradient among large ones has their rounding errors.
            largest = np.abs(other).max(initial=0.0)
            self._equal(f"state {i} of the optimizer {where}", one, other, 10 * self.tolerance * largest)

    def _compare_noise(self, where):
        measured, (noise, squared, count) = self.accumulating.noise_scale, self.plain.noise_totals
        if not count:
            assert np.isnan(measured.noise)
            return
        bound = 10 * self.tolerance * self.plain.noise_error
        self._equal(f"noise {where}", measured.noise, noise / count, bound)
        self._equal(f"gradient_squared {where}", measured.gradient_squared, squared / count, bound)

    def _require_motion(self):
        """Or the comparison says nothing."""
        if self.plain.update_step == 0:
            return
        bounds = [self._bound(p, path) / path for p, path in zip(self.plain.loss.trainable_params(), self.plain.path) if path]
        assert min(bounds, default=1.0) < (1e-3 if self.case.exact else 0.3), f"the bounds are too wide for the motion: {bounds}"


def _ignored(loss, aux):
    """What is done after a microbatch that is compared with nothing."""


def _open_window(accumulator):
    state = (*accumulator.buffers.parameters, accumulator.weight_sum, accumulator.mini_step)
    return [p.asnumpy().tobytes() for p in state]
