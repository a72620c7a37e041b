# status: wrong
# score: 0
# message: 2 stages, 2 micro-batches: the function returned None, not a list of lists: is there a return at its end?


def one_f_one_b(num_stages, num_microbatches):
    """Makes the lists and keeps them."""
    schedule = [[f"{stage}F{m}" for m in range(num_microbatches)] for stage in range(num_stages)]
    schedule[0].append("0B0")
