# status: partial
# score: 6
# message: 2 stages, 2 micro-batches: the step takes 12 where (m + P - 1) * (tf + tb) = 9 is enough (tf = 1, tb = 2): stage 0 begins its first backward after 1 forward and then waits.


def one_f_one_b(num_stages, num_microbatches):
    """One forward fewer than there are stages behind, so that every stage but the last waits."""
    schedule = []
    for stage in range(num_stages):
        num_warmup = min(max(num_stages - stage - 2, 0), num_microbatches)
        line = [f"{stage}F{microbatch}" for microbatch in range(num_warmup)]
        for microbatch in range(num_microbatches):
            if num_warmup + microbatch < num_microbatches:
                line.append(f"{stage}F{num_warmup + microbatch}")
            line.append(f"{stage}B{microbatch}")
        schedule.append(line)
    return schedule
