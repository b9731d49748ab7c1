"""What travels between ranks, and in how many collectives."""
import numpy as np
from conftest import MLP
from rank_cases import LAUNCHES, cases_of, every_launch_of

pytest_plugins = ["launch"]


def test_traffic_of_a_window_is_that_of_one_microbatch(left_by):
    """16 microbatches, N = 8: one bucket a window, the gradients and a header of 12 bytes. Parameters move at boundaries."""
    window, microbatch = left_by("traffic:window")[0], left_by("traffic:microbatch")[0]
    assert (window["collectives"], microbatch["collectives"]) == (2, 16)
    assert window["bytes"] == 2 * (window["parameters"] + 12)
    assert window["bytes"] * 8 == microbatch["bytes"]
    # Between two nodes: a header, then the gradients.
    nodes = left_by("traffic:nodes")[0]
    assert (nodes["collectives"], nodes["bytes"]) == (2 * 2, window["bytes"])
    for left in (*left_by("traffic:window"), *left_by("traffic:microbatch"), *left_by("traffic:nodes")):
        seen = np.array(left["seen"])
        assert seen.shape == (17, 10)
        assert [not np.array_equal(seen[i], seen[i + 1]) for i in range(16)] == ([False] * 7 + [True]) * 2


@every_launch_of("trained")
def test_shards_are_a_part_of_the_buffers(left_by, launch):
    whole, ranks = sum(p.nbytes for p in MLP().trainable_params()), LAUNCHES[launch][0]
    for case in cases_of(launch, "trained"):
        # Padding: at most an element in each of three buckets.
        parts = {"shard": ranks, "nodes-shard": ranks // 2, "one-node-shard": ranks}.get(case.split(":")[1], 1)
        share, padding = whole / parts, 3 * 4 if parts > 1 else 0
        assert all(left["sets"] == (3 if "shard" in case else 4) for left in left_by(case, launch)), case
        assert all(share <= left["buffers"] <= share + padding for left in left_by(case, launch)), case


def test_buckets_of_other_dtypes(left_by):
    """The header, with a number that float16 does not hold, travels alone where there is no float32."""
    expected = [np.full(shape, 3 * (i + 1)).tolist() for i, shape in enumerate([(3,), (2, 2), (), (5,)])]
    assert left_by("two_dtypes") == [[[expected, expected, [2 * 4097, 1], [2 * 4097, 1]]] * 2] * 2
