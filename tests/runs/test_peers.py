"""What users of other libraries have: updates of a run, empty microbatches."""
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import amp, nn
from support import reference
from support.modes import compiled_graphs
from support.training import LOSS, sgd, step_of

from ms_accum import TrainOneStepCell, until_weight, updates_of
from ms_accum.selftest.networks import MLP, batches, tensors


@pytest.mark.parametrize(("error", "message", "call"), [
    (ValueError, r"not known before the run with until_weight\(9, ", lambda: updates_of(until_weight(9), 7)),
    (ValueError, r"microbatches is 0, expected an int >= 1", lambda: updates_of(2, 0)),
    (TypeError, r"epochs is 1.5 of type float", lambda: updates_of(2, 7, 1.5)),
    (ValueError, r"accumulate_step is 0, expected an int >= 1", lambda: updates_of(0, 7)),
    (ValueError, "max_skips is -1, expected an int >= 0", lambda: step_of(on_nonfinite="skip_window", max_skips=-1)),
])
def test_what_cannot_be_meant_is_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()


# --- updates made -----------------------------------------------------------------------------------------------------


STAGES = st.dictionaries(st.integers(1, 12), st.integers(1, 9), max_size=3).map(lambda stages: {0: 2, **stages})


@given(st.one_of(st.integers(1, 9), STAGES), st.integers(1, 40), st.integers(1, 4))
def test_the_updates_of_a_run_are_counted_as_they_happen(accumulate_step, microbatches, epochs):
    updates = 0
    for _ in range(epochs):
        held = 0
        for _ in range(microbatches):
            held += 1
            if held >= reference.window_length(accumulate_step, updates):
                updates, held = updates + 1, 0
        updates += held > 0
    assert updates_of(accumulate_step, microbatches, epochs) == updates


# --- a microbatch without rows ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_compiled_for_a_microbatch_without_rows(mode_named):
    """Its loss is 0, and it counts. With a loss scaler, a window of such is dropped, and the cell returns the scale."""
    mode_named("graph")
    network, sizes, graphs = MLP(), [4, 0, 0, 4, 0, 0], []
    cell = TrainOneStepCell(nn.WithLossCell(network, LOSS), sgd(network), 2, loss_scaler=amp.StaticLossScaler(8.0))
    for i, (x, y) in enumerate(batches(sizes)):
        loss, dropped, scale = cell(*tensors(x, y))
        assert (float(loss) == 0, bool(dropped), float(scale)) == (len(x) == 0, i == 5, 8)
        graphs.append(compiled_graphs())
    assert graphs[1] == graphs[-1]  # the end of a window is compiled for the host when it is first needed
    assert (cell.status().update_step, cell.status().seen) == (2, 8)
