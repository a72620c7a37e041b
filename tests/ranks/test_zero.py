"""What the ZeRO stages send on torch, to the byte."""

import functools

import pytest

from tests.ranks import bare
from tests.ranks.test_training import MODEL, recorded

pytestmark = pytest.mark.ranks

# In units of all parameters' bytes. ZeRO-1 adds up gradients once a step and gathers what was updated; ZeRO-2 gathers
# once a step and scatters in each micro-batch; ZeRO-3 gathers twice in each.
EXPECTED = {
    "dp4 zero1 m2 torch": {"all_reduce": 1.0, "all_gather": 1.0},
    "dp4 zero2 m2 torch": {"all_gather": 1.0, "reduce_scatter": 2.0},
    "dp4 zero3 m2 torch": {"all_gather": 4.0, "reduce_scatter": 2.0},
    # Two replicas of two shards: each rank's half is added up over the replicas.
    "dp4 zero3 hybrid2": {"all_gather": 2.0, "reduce_scatter": 1.0, "all_reduce": 0.5},
}


def record_all():
    """Runs in each rank."""
    return {text: recorded(text) for text in EXPECTED}


@functools.cache
def all_rows():
    return bare.run(record_all, 4)


@pytest.mark.parametrize("text", EXPECTED)
def test_zero_communicates_what_its_stage_says(text):
    all_parameters = 4 * MODEL.num_parameters
    for rank in range(4):
        for rows in all_rows()[rank][text]:
            found = {}
            for row in rows:
                if row[6] == "dp":
                    found[row[0]] = found.get(row[0], 0) + row[8]
            assert found == {kind: share * all_parameters for kind, share in EXPECTED[text].items()}
