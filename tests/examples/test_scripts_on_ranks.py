"""tutorials/mnist/train.py on two ranks, with and without ZeRO, against one process with windows twice as long."""
import mindspore as ms
import numpy as np
from support.rank_cases import MNIST, every
from support.scripts import run_here

pytest_plugins = ["support.launch"]
SAVED = "run.safetensors"


def trained(path):
    """Parameters and moments in a checkpoint."""
    found = ms.load_checkpoint(str(path), format="safetensors")
    return {name: value.asnumpy() for name, value in found.items() if name.startswith(("dense", "optimizer:moments"))}


@every("mnist")
def test_two_ranks_train_as_one_process(left_by, folder_of, launch, case, capsys, uncompiled):
    """13 and 12 microbatches; only rank 0 prints and draws, and one process goes on with its file."""
    one = run_here("mnist", *MNIST, "--accumulate-step", "4")["history"]
    zero = ("mnist_zero", "mnist-zero") if launch == "scripts" else (case, "mnist")
    for name, folder in ((case, "mnist"), zero):
        (losses, accuracies), (others, same) = left_by(name, launch)
        assert len(losses) == len(one["loss"]) == 14
        np.testing.assert_allclose(losses, one["loss"], rtol=1e-3)  # float32, and ReLU
        np.testing.assert_allclose((accuracies, same), (one["accuracy"],) * 2, atol=0.2)
        assert others == []  # rank 0 has the log
        saved, alone = trained(folder_of(launch) / folder / SAVED), trained(SAVED)
        assert saved.keys() == alone.keys()
        assert len(saved) == 2 * 6
        for name, value in alone.items():
            assert np.linalg.norm(saved[name] - value) <= 1e-3 * np.linalg.norm(value), name
    path = folder_of(launch) / "mnist" / SAVED
    resumed = run_here("mnist", *MNIST, "--accumulate-step", "4", "--epochs", "3", "--resume", path)["history"]
    assert (len(resumed["loss"]), len(resumed["accuracy"])) == (21, 3)
    logs = [(folder_of(launch) / "logs" / f"worker_{rank}.log").read_text(encoding="utf-8") for rank in range(2)]
    assert ["epoch 2/2  loss" in log for log in logs] == [True, False]
    assert "an update takes 400 x 2 microbatches x 2 ranks = 1,600" in logs[0]
    assert [path.name for path in (folder_of(launch) / "mnist").glob("*run.*")] == [SAVED]
