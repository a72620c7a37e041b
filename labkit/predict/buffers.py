"""What a rank holds beside training state and activations: receive buffers, gathered weights, buckets of gradients."""

from labkit.plan import Plan
from labkit.predict.activations import stream_bytes
from labkit.predict.sizes import end_elements, layer_elements, passes_on, stage_elements

__all__ = [
    "bucket_bytes",
    "gathered_bytes",
    "in_buckets",
    "position_bytes",
    "received_bytes",
    "reduced_bytes",
    "sample_bytes",
    "summed_bytes",
    "update_bytes",
]

FP32, INT64 = 4, 8
_MOST_BUCKET = 500_000_000


def received_bytes(plan: Plan, stage: int) -> int:
    """torch's pipeline has buffers for every micro-batch: of the activations that a stage receives, and of gradients.

    4 N D each. Where backwards are split it also keeps the gradients of inputs until the step ends.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> received_bytes(plan.build(Model.preset("tiny"), Layout.parse("pp2 m4")), 0)
    262144
    """
    layout = plan.layout
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    is_split = layout.schedule in ("interleaved_zero_bubble", "zbv", "dualpipe_v")
    stays = is_split and not is_first and not passes_on(plan, stage - 1)
    num_each = (not is_first) + (not is_last) + stays
    return num_each * layout.num_microbatches * stream_bytes(plan.model, layout)


def sample_bytes(plan: Plan) -> int:
    """Tokens and targets of a rank's whole step, int64.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> sample_bytes(plan.build(Model.preset("tiny"), Layout.parse("m4")))
    8192
    """
    return 2 * INT64 * plan.layout.num_microbatches * plan.layout.microbatch_size * plan.model.seq_len


def position_bytes(plan: Plan, num_stages: int) -> int:
    """A rotation of each pair of a head's entries for every position (RoPE), once in each stage: 4 S K.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> position_bytes(plan.build(Model.preset("tiny"), Layout.parse("dp1")), 1)
    8192
    """
    return FP32 * plan.model.seq_len * plan.model.head_dim * num_stages if plan.model.position == "rope" else 0


def gathered_bytes(plan: Plan, stage: int, num_layers: int) -> int:
    """Weights that are whole for a while: of `num_layers` layers and of what belongs to none.

    ZeRO-3 gathers a layer just before it computes, and torch the next one ahead of time (Zhao et al. 2023, arXiv
    2304.11277, section 3.3); the embedding, the last norm and the head stay through forward or backward. torch's
    `replicate`, under tensor parallelism, works on a second copy of all weights.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> model = Model.preset("tiny")
    >>> gathered_bytes(plan.build(model, Layout.parse("dp4 zero3")), 0, 1) == 4 * model.num_layer_parameters
    True
    """
    layout = plan.layout
    if layout.dp == 1:
        return 0
    if layout.zero_stage >= 2 and layout.reshards and layout.dp > layout.hybrid:
        if num_layers == 0:
            return 0
        outer = 0 if plan.engine == "deepspeed" else FP32 * end_elements(plan, stage)
        return outer + min(num_layers, len(plan.layers(stage))) * FP32 * layer_elements(plan)
    return FP32 * stage_elements(plan, stage) if is_replicated(plan) else 0


def reduced_bytes(plan: Plan, stage: int) -> int:
    """Gradients on their way to their sum over dp.

    torch's `fully_shard` holds a layer's gradients whole, once as they come and once more packed; DeepSpeed packs into
    a bucket, which this lab makes as large as the model under ZeRO-1 and as its largest layer above.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> model = Model.preset("tiny")
    >>> reduced_bytes(plan.build(model, Layout.parse("dp4 zero3 torch")), 0) == 8 * model.num_layer_parameters
    True
    """
    model, layout = plan.model, plan.layout
    if layout.dp == 1:
        return 0
    if plan.engine == "deepspeed":
        largest = max(model.num_layer_parameters, model.vocab_size * model.d_model)
        bucket = model.num_parameters if layout.zero_stage == 1 else largest if layout.zero_stage else 0
        return FP32 * min(_MOST_BUCKET, bucket)
    if layout.zero_stage >= 2:
        return 2 * FP32 * layer_elements(plan)
    return FP32 * stage_elements(plan, stage) if is_replicated(plan) else 0


def update_bytes(plan: Plan, num_elements: int) -> int:
    """What ZeRO-1's update takes: the parts that a rank has updated, packed, and those of all ranks.

    Args:
        plan: the plan.
        num_elements: whose optimizer states the rank has.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> update_bytes(plan.build(Model.preset("tiny"), Layout.parse("dp4 zero1 torch")), 200_992) == 5 * 4 * 200_992
    True
    """
    layout = plan.layout
    if plan.engine == "deepspeed" or layout.dp == 1 or layout.zero_stage != 1:
        return 0
    return FP32 * (layout.dp + 1) * num_elements


def summed_bytes(plan: Plan, stage: int) -> int:
    """Gradients of a stage that wait, packed, for the step's end (`adds_up_at_the_end`).

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> built = plan.build(Model.preset("tiny"), Layout.parse("dp2 pp2 zbv v2"))
    >>> sum(summed_bytes(built, stage) for stage in (0, 3)) == 4 * built.num_parameters(0)
    True
    """
    return FP32 * stage_elements(plan, stage) if adds_up_at_the_end(plan) else 0


def in_buckets(plan: Plan) -> bool:
    """Whether gradients lie in DistributedDataParallel's buckets, which stay from step to step."""
    layout = plan.layout
    sums = plan.engine == "torch" and layout.dp > 1 and layout.zero_stage < 2
    return sums and layout.tp == 1 and not adds_up_at_the_end(plan)


def bucket_bytes(plan: Plan, stage: int) -> int:
    """Buckets beside the gradients: DistributedDataParallel adds several micro-batches up outside of them.

    Before the last micro-batch it is told to sum nothing (`no_sync`), and gradients that were forgotten after the last
    step come anew; they move to the buckets in the last backward.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> model = Model.preset("tiny")
    >>> [bucket_bytes(plan.build(model, Layout.parse(text)), 0) // model.num_parameters for text in ("dp4", "dp4 m2")]
    [0, 4]
    """
    has_more = in_buckets(plan) and plan.layout.num_microbatches > 1
    return FP32 * stage_elements(plan, stage) if has_more else 0


def is_replicated(plan: Plan) -> bool:
    """Whether torch's `replicate` adds up gradients over dp."""
    layout = plan.layout
    sums = plan.engine == "torch" and layout.dp > 1 and layout.zero_stage < 2
    return sums and layout.tp > 1 and not adds_up_at_the_end(plan)


def adds_up_at_the_end(plan: Plan) -> bool:
    """Whether gradients are packed and added up over dp once they are complete: in schedules of torch's runtime."""
    layout = plan.layout
    has_loop = layout.schedule in ("gpipe", "1f1b")
    return plan.engine == "torch" and layout.pp > 1 and layout.dp > 1 and layout.zero_stage < 2 and not has_loop
