# status: wrong
# score: 0
# message: 2 stages, 2 micro-batches: list 1 holds 0F0, an action of stage 0: list s holds the actions of stage s. Write 1F0.


def one_f_one_b(num_stages, num_microbatches):
    """The list of the first stage, for every stage."""
    num_warmup = min(num_stages, num_microbatches)
    line = [f"0F{microbatch}" for microbatch in range(num_warmup)]
    for microbatch in range(num_microbatches):
        line.append(f"0B{microbatch}")
        if num_warmup + microbatch < num_microbatches:
            line.append(f"0F{num_warmup + microbatch}")
    return [line] * num_stages
