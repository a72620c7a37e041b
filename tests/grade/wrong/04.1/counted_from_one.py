# status: wrong
# score: 0
# message: 2 stages, 2 micro-batches: rank 0 holds 0F2 but num_microbatches=2: micro-batches end at 1.


def one_f_one_b(num_stages, num_microbatches):
    """The right order, with micro-batches 1 to m."""
    schedule = []
    for stage in range(num_stages):
        num_warmup = min(num_stages - stage, num_microbatches)
        line = [f"{stage}F{microbatch + 1}" for microbatch in range(num_warmup)]
        for microbatch in range(num_microbatches):
            line.append(f"{stage}B{microbatch + 1}")
            if num_warmup + microbatch < num_microbatches:
                line.append(f"{stage}F{num_warmup + microbatch + 1}")
        schedule.append(line)
    return schedule
