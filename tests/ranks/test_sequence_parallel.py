"""What tensor parallelism sends when the residual stream is split over the sequence (Korthikanti et al. 2022, 4.2)."""

import functools
from collections import Counter

import pytest

from tests.ranks import bare
from tests.ranks.test_training import MODEL, recorded

pytestmark = pytest.mark.ranks

LAYOUT = "tp2 sp m2"
NUM_MICROBATCHES, SAMPLES, FP32_BYTES = 2, 1, 4


def record():
    """Runs in each rank."""
    return recorded(LAYOUT)


@functools.cache
def all_rows():
    return bare.run(record, 2)


def test_every_all_reduce_of_a_layer_is_a_reduce_scatter_and_an_all_gather_of_the_same_bytes():
    stream = SAMPLES * MODEL.seq_len * MODEL.d_model * FP32_BYTES
    per_token = SAMPLES * MODEL.seq_len * FP32_BYTES
    for rank in range(2):
        for rows in all_rows()[rank]:
            found = Counter((row[0], row[8]) for row in rows if row[6] == "tp")
            # Four of each in a layer, forward and backward together; one of each around the embedding and the head.
            pairs = NUM_MICROBATCHES * (4 * MODEL.num_layers + 2)
            assert found == {
                ("reduce_scatter", stream): pairs,
                ("all_gather", stream): pairs,
                ("all_reduce", per_token): 3 * NUM_MICROBATCHES,
            }
