# status: wrong
# score: 0
# message: 2 stages, 2 micro-batches: rank 1 waits at 1B0 for 1F0: no rank can go on. Put 1F0 before 1B0 on rank 1.


def one_f_one_b(num_stages, num_microbatches):
    """P - s - 1 forwards first, but then the backward before the forward: the last stage cannot begin."""
    schedule = []
    for stage in range(num_stages):
        num_warmup = min(num_stages - stage - 1, num_microbatches)
        line = [f"{stage}F{microbatch}" for microbatch in range(num_warmup)]
        for microbatch in range(num_microbatches):
            line.append(f"{stage}B{microbatch}")
            if num_warmup + microbatch < num_microbatches:
                line.append(f"{stage}F{num_warmup + microbatch}")
        schedule.append(line)
    return schedule
