# status: partial
# score: 3
# message: 2 stages, 2 micro-batches: rank 0 runs 0B1 before 0B0: micro-batches go in order, forward and backward alike.


def one_f_one_b(num_stages, num_microbatches):
    """A stack where a queue belongs: the backward of the newest micro-batch comes first."""
    schedule = []
    for stage in range(num_stages):
        num_warmup = min(num_stages - stage - 1, num_microbatches)
        line, in_flight = [], []
        for microbatch in range(num_microbatches):
            line.append(f"{stage}F{microbatch}")
            in_flight.append(microbatch)
            if len(in_flight) > num_warmup:
                line.append(f"{stage}B{in_flight.pop()}")
        while in_flight:
            line.append(f"{stage}B{in_flight.pop()}")
        schedule.append(line)
    return schedule
