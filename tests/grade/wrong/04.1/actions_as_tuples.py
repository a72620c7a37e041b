# status: wrong
# score: 0
# message: 2 stages, 2 micro-batches: list 0 holds a tuple at place 0, not a text such as '0F0'.


def one_f_one_b(num_stages, num_microbatches):
    """The right actions in the right order, but not as text."""
    schedule = []
    for stage in range(num_stages):
        num_warmup = min(num_stages - stage, num_microbatches)
        line = [(stage, "F", microbatch) for microbatch in range(num_warmup)]
        for microbatch in range(num_microbatches):
            line.append((stage, "B", microbatch))
            if num_warmup + microbatch < num_microbatches:
                line.append((stage, "F", num_warmup + microbatch))
        schedule.append(line)
    return schedule
