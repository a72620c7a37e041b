# status: partial
# score: 8
# message: 4 stages, 2 micro-batches: list 0 holds '0B-1': an action is a stage, F or B, and a micro-batch, counted from 0, such as '0F0'.


def one_f_one_b(num_stages, num_microbatches):
    """Right as long as there are at least as many micro-batches as stages."""
    schedule = []
    for stage in range(num_stages):
        num_warmup = num_stages - stage - 1
        line = [f"{stage}F{microbatch}" for microbatch in range(num_warmup)]
        for microbatch in range(num_microbatches - num_warmup):
            line += [f"{stage}F{num_warmup + microbatch}", f"{stage}B{microbatch}"]
        line += [f"{stage}B{microbatch}" for microbatch in range(num_microbatches - num_warmup, num_microbatches)]
        schedule.append(line)
    return schedule
