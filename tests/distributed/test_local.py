"""Local updates in one process; test_exchange.py has them in several, and resumes them in the middle of a round."""
import pytest
from support.differential.accumulating import Accumulating
from support.differential.follow import Comparison
from support.differential.ranks import LOCAL, case_of, simulated
from support.mlp import MLP
from support.rank_cases import accumulator

from ms_accum.distributed import LocalUpdates


@pytest.mark.parametrize("driver", [
    "step-pynative", "cell-pynative", "hand-pynative", "step",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("hand-jit", "cell-graph"))])
def test_one_rank_takes_the_outer_steps_along_its_own_differences(driver):
    """In mid-epoch, and in the end. Control: plain training is something else."""
    case = case_of("local")._replace(driver=driver)
    run = Accumulating(case, case.seed, local_updates=lambda parameters: LocalUpdates(parameters, *LOCAL))
    with run.driver as driving:
        run.train(case.batches(0), last=True)
        driving.flush()
    run.local.finish()
    comparison = Comparison(case, simulated(case, 1)[0])
    comparison.counters(run.facts(), driver)
    comparison.window(run.facts(), driver)
    with pytest.raises(pytest.fail.Exception, match="plain training has"):
        Comparison(case, simulated(case._replace(sync="window"), 1)[0]).window(run.facts(), driver)


@pytest.mark.parametrize(("momentum", "copies"), [(0.9, 2), (0, 1)])
def test_the_outer_state_is_two_copies_and_one_without_momentum(momentum, copies):
    network = MLP()
    local = LocalUpdates(network.trainable_params(), outer_momentum=momentum)
    plain, outer = (sum(p.nbytes for p in acc.parameters)
                    for acc in (accumulator(MLP()), accumulator(network, after_update=local)))
    assert outer - plain == copies * sum(p.nbytes for p in local.trained) + local.updates.nbytes
