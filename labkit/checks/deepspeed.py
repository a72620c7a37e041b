"""Chapter 10: a DeepSpeed configuration and its restore code, repaired.

What is expected is computed here: batches and learning rates by arithmetic. Losses after a restore are compared with
those of the engine that was saved and went on: they are equal to the last bit, in every ZeRO stage.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.exercise import Case, Criterion, Exercise, Finding, Idea, Measure

__all__ = ["REPAIR"]

TRIAL = "labkit.rank.trials.deepspeed:train_and_restore"
PREPARE = "labkit.rank.trials.deepspeed:prepare"
# Two engines are made in a case: a second on an idle laptop, and several where other things run.
PATIENCE = 3
BYTES_OF_BF16 = 2

_Told = Mapping[str, Any]


def _case(
    criterion: str,
    members: tuple[int, ...],
    batch: tuple[int, int],
    stage: int,
    *,
    steps: tuple[int, int] = (3, 0),
    schedule: tuple[float, int, int] = (0.01, 2, 8),
    bucket_bytes: int = 4096,
    num_skipped: int = 0,
    hidden: bool = False,
) -> Case:
    """A case; `batch` is the micro-batch's size and how many are accumulated, `schedule` rate, warm-up and steps."""
    micro, accumulation = batch
    batch_size = micro * accumulation * len(members)
    learning_rate, num_warmup_steps, num_steps = schedule
    return Case(
        name=f"{len(members)} ranks, {batch_size} samples in micro-batches of {micro}, stage {stage}",
        criterion=criterion,
        trial=TRIAL,
        members=members,
        inputs={
            "asked": {
                "batch_size": batch_size,
                "microbatch_size": micro,
                "stage": stage,
                "bucket_bytes": bucket_bytes,
                "learning_rate": learning_rate,
                "num_warmup_steps": num_warmup_steps,
                "num_steps": num_steps,
            },
            "num_before": steps[0],
            "num_after": steps[1],
            "num_skipped": num_skipped,
        },
        hidden=hidden,
        prepare=PREPARE,
        patience=PATIENCE,
    )


def _cases(seed: int) -> tuple[Case, ...]:
    draw = random.Random(seed)
    micro, stages = draw.randrange(2, 5), draw.sample((1, 2, 3), 3)
    schedule = (draw.choice([0.003, 0.02]), draw.randrange(3, 5), draw.randrange(7, 10))
    skipped = draw.randrange(1, 30)
    return (
        _case("batch", (0, 1, 2, 3), (2, 2), 3, steps=(1, 0)),
        _case("memory", (0, 1), (2, 1), 2, steps=(1, 0)),
        _case("rate", (0, 1), (1, 2), 1, steps=(6, 0), schedule=(0.01, 3, 6)),
        _case("restore", (0, 1, 2, 3), (2, 1), 3, steps=(3, 3)),
        _case("samples", (0, 1, 2), (1, 2), 1, steps=(2, 1), num_skipped=5),
        _case("batch", (3, 1, 2), (micro, 1), 0, steps=(1, 0), hidden=True),
        _case("batch", (1, 0), (1, micro), stages[0], steps=(1, 0), hidden=True),
        _case("memory", (2, 0, 1), (1, 1), stages[1], steps=(1, 0), bucket_bytes=1 << 16, hidden=True),
        _case("rate", (0, 3, 1), (2, 3), stages[2], steps=(schedule[2], 0), schedule=schedule, hidden=True),
        _case("restore", (1, 2), (micro, 2), stages[0], steps=(4, 2), schedule=schedule, hidden=True),
        _case("restore", (2, 0, 3), (1, 3), stages[1], steps=(2, 3), hidden=True),
        _case("samples", (3, 2, 1, 0), (2, 1), stages[2], steps=(1, 1), num_skipped=skipped, hidden=True),
    )


def _rates(asked: Mapping[str, Any], num: int, *, counted: int = 1) -> list[float]:
    """The learning rate of each of the first steps, as DeepSpeed's WarmupDecayLR gives them with a linear warm-up.

    Its count begins after the first step, so that the first two are taken with the lowest rate (deepspeed 0.19,
    runtime/lr_schedules.py). `counted` multiplies both lengths, as somebody does who counts micro-batches.
    """
    warmup, total = max(2, asked["num_warmup_steps"] * counted), asked["num_steps"] * counted
    parts = []
    for count in range(-1, num - 1):
        falling = max(0.0, (total - count) / max(1.0, total - warmup))
        parts.append(max(0, count) / warmup if count < warmup else falling)
    return [asked["learning_rate"] * part for part in parts]


def _judge(case: Case, values: tuple[Any, ...]) -> Finding:
    for rank, told in enumerate(values):
        refused = told.get("refused")
        if refused is not None:
            message = f"DeepSpeed refuses the configuration on {len(values)} ranks ({_plain(refused)})"
            return _wrong(case, message, idea="batch" if "atch" in refused else "refused")
        finding = _JUDGES[case.criterion](case, told, rank)
        if finding is not None:
            return finding
    return Finding(passed=True, measures=_measures(case, values[0]))


def _batch(case: Case, told: _Told, rank: int) -> Finding | None:
    asked, num_ranks = case.inputs["asked"], len(case.members)
    product = f"{told['micro']} * {told['accumulation']} * {num_ranks}"
    if told["batch"] != asked["batch_size"]:
        wanted = f"{asked['batch_size']} were asked for"
        return _wrong(case, f"a step takes {told['batch']} = {product} samples, and {wanted}", idea="batch")
    if told["micro"] != asked["microbatch_size"]:
        wanted = f"{asked['microbatch_size']} were asked for"
        return _wrong(case, f"a micro-batch has {told['micro']} samples ({product}), and {wanted}", idea="batch")
    return None


def _memory(case: Case, told: _Told, rank: int) -> Finding | None:
    asked = case.inputs["asked"]
    if told["stage"] != asked["stage"]:
        return _wrong(case, f"ZeRO stage {told['stage']} runs, and {asked['stage']} was asked for", idea="stage")
    if told["dtype"] != "bfloat16":
        return _wrong(case, f"the weights are {told['dtype']}, and bfloat16 was asked for", idea="precision")
    if told["offloaded"]:
        what = " and ".join(f"offload_{one}" for one in told["offloaded"])
        nothing = f", and in stage {told['stage']} it does nothing" if told["offloaded"] == ["param"] else ""
        message = f"{what} stands in the configuration{nothing * (told['stage'] < 3)}: nobody asked for it"
        return _wrong(case, message, idea="offload")
    num_bytes, most = _bucket_bytes(told), asked["bucket_bytes"]
    if num_bytes > most:
        counted = f"{told['bucket_numbers']} numbers of {BYTES_OF_BF16} bytes"
        message = f"the gradient bucket takes {num_bytes} B ({counted}), and {most} B are allowed"
        return _wrong(case, message, idea="bucket", measures=_measures(case, told))
    return None


def _rate(case: Case, told: _Told, rank: int) -> Finding | None:
    asked, seen = case.inputs["asked"], [one["rate"] for one in told["trained"]]
    wanted = _rates(asked, len(seen))
    first = next((step for step, pair in enumerate(zip(seen, wanted, strict=True)) if not _near(*pair)), None)
    if first is None:
        return None
    message = f"step {first + 1} was taken with the learning rate {seen[first]:.4g} and not {wanted[first]:.4g}"
    micros = _rates(asked, len(seen), counted=told["accumulation"])
    idea = "decay"
    if len(set(seen)) == 1:
        message, idea = f"{message}: it never changes", "scheduler"
    elif told["accumulation"] > 1 and all(map(_near, seen, micros)):
        message, idea = f"{message}: the scheduler counts steps, and not micro-batches", "counted"
    elif first <= asked["num_warmup_steps"]:
        message, idea = f"{message}: the warm-up is no straight line from 0", "warmup"
    return _wrong(case, message, got=_listed(seen), wanted=_listed(wanted), idea=idea)


def _restore(case: Case, told: _Told, rank: int) -> Finding | None:
    before, on = case.inputs["num_before"], f"on rank {rank} of {len(case.members)}"
    loads = told["loads"]
    if not loads:
        return _wrong(case, f"`restore` did not call engine.load_checkpoint {on}", idea="restore")
    last = loads[-1]
    if not last["found"]:
        where = "<folder>" if last["where"] == "." else f"<folder>/{last['where']}"
        message = f"load_checkpoint looked for {where}/latest, found nothing there and returned (None, None)"
        step = f"the engine is at step {told['step']}, and step {before} was saved"
        return _wrong(case, f"{message}: {step}", idea="tag")
    if told["step"] != before:
        message = f"the engine is at step {told['step']} after `restore`, and step {before} was saved"
        return _wrong(case, message, idea="partial")
    for number, (got, wanted) in enumerate(zip(told["resumed"], told["unbroken"], strict=True), start=before + 1):
        if not _near(got["rate"], wanted["rate"]):
            rates = f"the learning rate {got['rate']:.4g} and not {wanted['rate']:.4g}"
            return _wrong(case, f"step {number} is taken with {rates} after `restore`", idea="partial")
        if got["loss"] != wanted["loss"]:
            losses = f"has the loss {got['loss']:.6g} after `restore` and {wanted['loss']:.6g} without a break"
            return _wrong(case, f"step {number} {losses}", idea="weights" if number == before + 1 else "partial")
    return None


def _samples(case: Case, told: _Told, rank: int) -> Finding | None:
    if told["returned"] == told["num_samples"]:
        return None
    trained = case.inputs["num_before"] * told["batch"]
    given = f"`save` was given {told['num_samples']}, of which {trained} were trained on"
    return _wrong(case, f"`restore` returned {told['returned']} on rank {rank}, and {given}", idea="samples")


_JUDGES: Mapping[str, Callable[[Case, _Told, int], Finding | None]] = {
    "batch": _batch,
    "memory": _memory,
    "rate": _rate,
    "restore": _restore,
    "samples": _samples,
}


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 + 1e-6 * abs(b)


def _bucket_bytes(told: _Told) -> int:
    return int(BYTES_OF_BF16 * told["bucket_numbers"]) if told["stage"] else 0


def _measures(case: Case, told: _Told) -> tuple[Measure, ...]:
    if case.criterion != "memory":
        return ()
    most = case.inputs["asked"]["bucket_bytes"]
    return (Measure(name="bytes of the gradient bucket", value=_bucket_bytes(told), budget=most, unit="B"),)


def _wrong(case: Case, message: str, **fields: Any) -> Finding:
    """A finding that did not pass."""
    asked = ", ".join(f"{name} {value}" for name, value in case.inputs["asked"].items())
    given = f"{len(case.members)} ranks; {asked}"
    return Finding(passed=False, message=f"{message}.", given=given, **fields)


def _plain(refused: str) -> str:
    """DeepSpeed's own words, without the types and addresses that a checking library adds."""
    return refused.partition(" [type=")[0].removesuffix(".")


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{one:.4g}" for one in numbers)


_CRITERIA = (
    Criterion(name="batch", points=2, text="a step takes the samples that were asked for, on any number of ranks"),
    Criterion(name="memory", points=2, text="stage and precision as asked, nothing offloaded, the bucket in its bytes"),
    Criterion(name="rate", points=2, text="the learning rate rises and falls in straight lines, counted in steps"),
    Criterion(name="restore", points=2, text="a restored engine goes on as the saved one does, to the last bit"),
    Criterion(name="samples", points=2, text="a restored run knows how many samples were read"),
)

_IDEAS = {
    "batch": Idea(
        first="train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks, always.",
        further="What is asked for gives you the first, the second and the last: compute the third from them.",
    ),
    "refused": Idea(
        first="DeepSpeed says which field it does not take.",
        further="Hand your dictionary to lk.plan.from_deepspeed(config, world_size=...): it explains every field.",
    ),
    "stage": Idea(
        first="The stage stands in zero_optimization.", further="Pass `stage` on: it differs from case to case."
    ),
    "precision": Idea(
        first="Without a word about it DeepSpeed trains in float32.", further='Keep `"bf16": {"enabled": True}`.'
    ),
    "offload": Idea(
        first="Offload is for models that do not fit otherwise, and each of its two kinds has its own condition: "
        "parameters only leave the device in stage 3, in others the entry does nothing.",
        further="Take offload_optimizer and offload_param out.",
    ),
    "bucket": Idea(
        first="What does reduce_bucket_size count?",
        further="It counts numbers, not bytes, and a number takes 2 bytes in bfloat16: bucket_bytes // 2.",
    ),
    "scheduler": Idea(
        first="Without a scheduler the rate of the optimizer's params holds for every step.",
        further='Add a "scheduler" of type WarmupDecayLR.',
    ),
    "warmup": Idea(
        first="How does WarmupDecayLR warm up when nothing is said about it?",
        further='The default is logarithmic: set "warmup_type": "linear", warmup_min_lr to 0, and warmup_max_lr and '
        "warmup_num_steps as asked.",
    ),
    "counted": Idea(
        first="DeepSpeed's scheduler moves on once for each step of the optimizer.",
        further="Give total_num_steps and warmup_num_steps in steps, whatever gradient_accumulation_steps is.",
    ),
    "decay": Idea(
        first="WarmupDecayLR falls from the highest rate, after the warm-up, to 0 at total_num_steps.",
        further="Set total_num_steps to num_steps: a number that somebody found in another file belongs to that file.",
    ),
    "restore": Idea(
        first="A fresh engine has weights of its own.", further="Call engine.load_checkpoint, and look at its path."
    ),
    "tag": Idea(
        first="load_checkpoint takes the folder that was saved to, and finds the newest tag in it by itself. When it "
        "finds nothing it says so in its result, and in no other way.",
        further="Call engine.load_checkpoint(folder), and raise an error when the path that it returns is None.",
    ),
    "partial": Idea(
        first="A run that goes on needs more than weights: the optimizer's averages, the scheduler's count.",
        further="Leave load_optimizer_states and load_lr_scheduler_states at True, and load_module_only at False.",
    ),
    "weights": Idea(
        first="The first loss after a restore depends on the weights alone.",
        further="Load what was saved last, and change nothing in the engine afterwards.",
    ),
    "samples": Idea(
        first="DeepSpeed keeps steps and weights; where the data stood it cannot know. Some samples were read and "
        "skipped, so no product of steps and batch gives the number.",
        further="Hand `client_state={...}` to save_checkpoint, and take it from the second value of load_checkpoint.",
    ),
    "raised": Idea(
        first="Read the message and the line: it is your code that stopped, or DeepSpeed called from there.",
        further="`deepspeed_config` is called with keywords and returns a dictionary; `save(engine, folder, "
        "num_samples)` and `restore(engine, folder)` run on every rank.",
    ),
    "timeout": Idea(
        first="save_checkpoint and load_checkpoint are collective: every rank calls them.",
        further="Take away any `if` about the rank around them.",
    ),
    "lost": Idea(first="The process of a rank ended.", further="Is a bucket so large that there is no memory for it?"),
    "unsolved": Idea(
        first="Nothing is written yet.", further="Copy what was found, and repair one thing after the other."
    ),
    "missing": Idea(
        first="The grader looks for three functions of these very names.", further="Run the cells that define them."
    ),
}

REPAIR = Exercise(
    question="10.1",
    title="a DeepSpeed configuration and its restore code, repaired",
    chapter="10_deepspeed",
    answers=("deepspeed_config", "save", "restore"),
    criteria=_CRITERIA,
    cases=_cases,
    judge=_judge,
    ideas=_IDEAS,
)
