"""Chapter 06: what to think about again, by the mistake that was seen."""

from labkit.exercise import Idea

__all__ = ["RING_IDEAS", "TREE_IDEAS"]

RING_IDEAS = {
    "sum": Idea(
        first="Follow one chunk round the ring: who holds which chunk before each step?",
        further="What a rank receives in a step is what its left neighbour sends in that step: its index is the "
        "neighbour's, one less than your own. In the next step you send what you have just received.",
    ),
    "half": Idea(
        first="A ring has two phases of N - 1 steps: reduce-scatter, then all-gather.",
        further="After N - 1 steps each rank holds one finished chunk. Send it on for N - 1 more steps, and put "
        "what arrives in its place instead of adding it.",
    ),
    "rest": Idea(
        first="The chunks together must cover x, also where N does not divide its size.",
        further="Let some chunks be one number longer, or pad x to a multiple of N and cut the result. Chunks may "
        "be empty.",
    ),
    "powers": Idea(
        first="Three ranks are no power of two: who meets whom?",
        further="Count steps and neighbours by N itself, modulo N, and see what the last rank does when N is odd.",
    ),
    "group": Idea(
        first="A group counts its own ranks: 0 to N - 1 in the order of its members.",
        further="Use dist.get_rank(group) for chunks and neighbours alike, and group_dst and group_src to send.",
    ),
    "budget": Idea(
        first="How many numbers does a message of the ring carry?",
        further="Each of the 2 (N - 1) messages of a rank carries one chunk of n / N numbers, to the same "
        "neighbour. Nobody ever sends the whole tensor.",
    ),
    "neighbour": Idea(
        first="Who sends to whom? A ring has no centre.",
        further="Rank r only ever sends to rank r + 1, modulo N, and receives from rank r - 1.",
    ),
    "unseen": Idea(
        first="What is sent is counted in the thread that runs your function, in bytes.",
        further="Call isend and recv in the function itself, with chunks of x as they are.",
    ),
    "collective": Idea(
        first="The backend's collective is what you are to build.",
        further="dist.isend to the next rank, dist.recv from the one before, then wait for the send.",
    ),
    "result": Idea(
        first="What goes in comes out: one tensor of the shape and type of x, on every rank.",
        further="Return the tensor, also when you worked in x itself, and cut off what was padded.",
    ),
    "raised": Idea(
        first="Read the line that raised: which rank, which chunk, which size?",
        further="Run the function on two ranks with four numbers, and print rank, step and the chunks' indices.",
    ),
    "timeout": Idea(
        first="Who waits for whom? A send may end only when its receiver takes the message.",
        further="If every rank calls send first, nobody ever comes to its recv. Start the send with isend, then "
        "recv, then wait for the send.",
    ),
    "lost": Idea(
        first="A rank's process ended while the function ran.",
        further="Look for what ends a process: os._exit, a signal, or more memory than there is.",
    ),
}

TREE_IDEAS = {
    **RING_IDEAS,
    "sum": Idea(
        first="Reduce up the tree, then broadcast down the same tree: who is whose parent?",
        further="In round d = 1, 2, 4, ... a rank that is an odd multiple of d sends its sum to rank - d and is done; "
        "an even multiple receives from rank + d. On the way down the same pairs meet in the opposite order.",
    ),
    "half": Idea(
        first="A tree has two phases: up to the root, and down again.",
        further="After ceil(log2 N) rounds only the root has the sum. Send it down by the same pairs, in the opposite "
        "order.",
    ),
    "powers": Idea(
        first="Three ranks are no power of two: who has no partner?",
        further="There are ceil(log2 N) rounds. A rank whose partner would be N or more has nothing to do in that "
        "round, and goes on to the next.",
    ),
    "rest": Idea(
        first="A tree moves whole tensors: no chunk is ever cut.",
        further="Send x as it is, whatever its size, and receive into a tensor of its shape.",
    ),
    "budget": Idea(
        first="How many tensors pass through the root?",
        further="A root that talks to all others moves 2 (N - 1) tensors. Let half of the ranks add up for the other "
        "half first: the root then meets only ceil(log2 N) children.",
    ),
    "chain": Idea(
        first="How many messages have to wait for each other, one after the other?",
        further="In a chain or a ring each rank waits for the one before. Pairs of a binomial tree work at the same "
        "time: 0 with 1 and 2 with 3, then 0 with 2. A send counts as waiting for each recv and irecv called before.",
    ),
    "crossover": Idea(
        first="Write both times as alpha times something plus n beta times something, and set them equal.",
        further="A message of the ring carries n / N bytes, one of the tree n bytes. Levels are whole: ceil(log2 N). "
        "Everything is in bytes and seconds, and for N = 2 and 3 the number of steps is the same.",
    ),
    "faster": Idea(
        first="For a tiny message only the number of steps counts, for a huge one only the bytes. Which is which?",
        further="You will read that rings suit small messages and trees large ones. Put n = 1 byte into both formulas, "
        "with N = 64: 126 alpha against 12 alpha.",
    ),
    "collective": Idea(
        first="The backend's collective is what you are to build.",
        further="dist.send to the parent and dist.recv from the children, then the other way round.",
    ),
}
