# status: partial
# score: 5
# message: 2 stages, 2 micro-batches: stage 1 has 2 micro-batches in flight at once, and 1F1B has at most P - s = 1 there.


def one_f_one_b(num_stages, num_microbatches):
    """GPipe under another name."""
    return [
        [f"{stage}{kind}{microbatch}" for kind in "FB" for microbatch in range(num_microbatches)]
        for stage in range(num_stages)
    ]
