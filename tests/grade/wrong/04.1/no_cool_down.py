# status: wrong
# score: 0
# message: 2 stages, 2 micro-batches: 0B1 is missing: every stage runs F and B (or I and W) of every micro-batch. Add it to stage 0's rank.


def one_f_one_b(num_stages, num_microbatches):
    """Stops when the forwards are used up."""
    schedule = []
    for stage in range(num_stages):
        num_warmup = min(num_stages - stage - 1, num_microbatches)
        line = [f"{stage}F{microbatch}" for microbatch in range(num_warmup)]
        for microbatch in range(num_microbatches - num_warmup):
            line += [f"{stage}F{num_warmup + microbatch}", f"{stage}B{microbatch}"]
        schedule.append(line)
    return schedule
