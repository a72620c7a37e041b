# status: partial
# score: 3
# message: 2 stages, 2 micro-batches: stage 1 has 2 micro-batches in flight at once, and 1F1B has at most P - s = 1 there.


def one_f_one_b(num_stages, num_microbatches):
    """Every stage warms up as long as the first one."""
    schedule = []
    for stage in range(num_stages):
        num_warmup = min(num_stages, num_microbatches)
        line = [f"{stage}F{microbatch}" for microbatch in range(num_warmup)]
        for microbatch in range(num_microbatches):
            line.append(f"{stage}B{microbatch}")
            if num_warmup + microbatch < num_microbatches:
                line.append(f"{stage}F{num_warmup + microbatch}")
        schedule.append(line)
    return schedule
