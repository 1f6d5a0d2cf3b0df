"""Errors of networks in float16 beside those of PyTorch, which were measured once."""

import jax
import pytest
from helpers import exhaustive_but

from benchmarks import pytorch, report
from benchmarks.networks import NETWORKS
from benchmarks.pytorch import OURS, THEIRS

ROWS = report.load(pytorch.RESULTS)["rows"]
BY_DEFAULT = ["gain that two readers read", "dot of losses and weights"]


def test_the_results_are_of_these_networks():
    assert list(ROWS) == list(NETWORKS)
    for name, network in NETWORKS.items():
        assert ROWS[name]["stress"] == network.stress
        assert [x["size"] for x in ROWS[name]["errors"]] == list(network.sizes)


@pytest.mark.parametrize("name", NETWORKS)
def test_both_frameworks_compute_the_same_network(name):
    for row in ROWS[name]["errors"]:
        loss, gradients = row["float32 of both"]
        assert loss < 1e-4
        assert gradients < 0.02


@pytest.mark.parametrize("name", NETWORKS)
def test_the_error_is_at_most_twice_that_of_pytorch_or_has_a_reason(name):
    is_worse = pytorch.times(ROWS[name], OURS, THEIRS) > 2
    assert is_worse == ("reason" in ROWS[name]), ROWS[name]["errors"]


@pytest.mark.parametrize("name", exhaustive_but(NETWORKS, BY_DEFAULT))
def test_the_error_is_still_at_most_twice_that_of_pytorch_or_has_a_reason(name):
    with jax.numpy_dtype_promotion("standard"):
        today = pytorch.measure_in_jax(NETWORKS[name])
    pairs = zip(ROWS[name]["errors"], today, strict=True)
    row = {"errors": [old | {OURS: new} for old, (_, new) in pairs]}
    assert (pytorch.times(row, OURS, THEIRS) > 2) == ("reason" in ROWS[name])
