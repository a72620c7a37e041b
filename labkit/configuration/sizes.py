"""Sizes that count elements and not bytes, and the buffers that they cost."""

from collections.abc import Iterator

from labkit.configuration.document import Document
from labkit.configuration.finding import Finding, note, risk
from labkit.configuration.offload import state_bytes

__all__ = ["check_sizes"]

_ZERO = "zero_optimization"
_REDUCE, _GATHER = f"{_ZERO}.reduce_bucket_size", f"{_ZERO}.allgather_bucket_size"
_LIVE, _PREFETCH = f"{_ZERO}.stage3_max_live_parameters", f"{_ZERO}.stage3_prefetch_bucket_size"
_PERSIST, _GROUP = f"{_ZERO}.stage3_param_persistence_threshold", f"{_ZERO}.sub_group_size"
_SOURCE = "deepspeed/runtime/zero/config.py"


def check_sizes(doc: Document) -> Iterator[Finding]:
    """Say what buckets and thresholds cost, in bytes, and find those that cannot be meant."""
    if doc.stage == 0:
        return
    yield from _buckets(doc)
    yield from _overlap(doc)
    if doc.stage == 3:
        yield from _stage_3(doc)
    yield from _states(doc)


def _gb(doc: Document, elements: float) -> str:
    size = elements * doc.element_bytes / 1e9
    return f"{size:.1f} GB" if size >= 0.1 else f"{size * 1000:.1f} MB"


def _buckets(doc: Document) -> Iterator[Finding]:
    for path in (_REDUCE, _GATHER) if doc.stage < 3 else (_REDUCE,):
        size = doc.integer(path)
        if size is None or doc.is_auto(path) or (path == _GATHER and not doc.has(path)):
            continue
        name = path.rpartition(".")[2]
        fact = f"{name}={size:,} elements = {_gb(doc, size)} in {doc.precision}"
        use = "a buffer of that size is allocated" if path == _REDUCE else "so many are gathered at a time"
        if path == _REDUCE and doc.stage == 2:
            use += " in backward, so that a small model can take more memory in stage 2 than in stage 1"
        rule = f"it counts elements, not bytes ({doc.element_bytes} bytes each), and {use}"
        model = doc.facts.model
        if size >= 5_000_000_000:
            yield risk(path, fact, rule, "Use 500000000 (1.0 GB in bf16) or less, if memory is short.", _SOURCE)
        elif model is not None and size > model.num_parameters:
            fact += f", and the model has {model.num_parameters:,} parameters"
            yield note(path, fact, rule, "A smaller bucket frees memory and lets reduction start earlier.", _SOURCE)
        elif size < 1_000_000 and path == _REDUCE:
            rule = "so small a bucket makes many small collectives, whose latency counts"
            yield risk(path, fact, rule, "Use 50000000 or more.", _SOURCE)
        else:
            yield note(path, fact, rule, "", _SOURCE)


def _overlap(doc: Document) -> Iterator[Finding]:
    path, stage = f"{_ZERO}.overlap_comm", doc.stage
    size = doc.integer(_REDUCE)
    if stage == 3 and path not in doc.values:
        yield note(
            path, "overlap_comm is left out", "the default is true in stage 3, and false in stages 1 and 2", "", _SOURCE
        )
    elif stage in (1, 2) and doc.flag(path) and size:
        yield note(
            path,
            f"overlap_comm=true in stage {stage}",
            f"reduction overlaps backward with two buffers of reduce_bucket_size instead of one: {_gb(doc, 2 * size)}",
            "Lower reduce_bucket_size where memory is short.",
            "deepspeed/runtime/zero/stage_1_and_2.py",
        )


def _stage_3(doc: Document) -> Iterator[Finding]:
    live, prefetch, persist = doc.integer(_LIVE), doc.integer(_PREFETCH), doc.integer(_PERSIST)
    if live is not None and doc.has(_LIVE):
        yield note(
            _LIVE,
            f"stage3_max_live_parameters={live:,} elements = {_gb(doc, live)} in {doc.precision}",
            "it caps gathered parameters on a GPU, not all memory",
            "Lower it, with stage3_max_reuse_distance, where memory is short; it costs communication.",
            _SOURCE,
        )
    if live is not None and prefetch is not None and prefetch > live:
        yield risk(
            _PREFETCH,
            f"stage3_prefetch_bucket_size={prefetch:,} is above stage3_max_live_parameters={live:,}",
            "what is gathered ahead counts as live",
            f"Use {live // 2} or less.",
            _SOURCE,
        )
    model = doc.facts.model
    if model is not None and persist is not None and persist >= model.d_model * model.d_model:
        yield risk(
            _PERSIST,
            f"stage3_param_persistence_threshold={persist:,} elements, and a d_model x d_model matrix has "
            f"{model.d_model**2:,}",
            "smaller parameters stay whole on every rank, so hardly anything is sharded",
            f"Use {10 * model.d_model}, above norms and biases only.",
            _SOURCE,
        )
    group = doc.integer(_GROUP)
    if group is not None and group > 10**11 and doc.device("offload_optimizer") == "nvme":
        yield risk(
            _GROUP,
            f"sub_group_size={group:.0e} elements with NVMe",
            "the optimizer updates that many at a time, so all of them come into host memory together",
            "Use 1000000000 or less.",
            _SOURCE,
        )


def _states(doc: Document) -> Iterator[Finding]:
    model, ranks = doc.facts.model, doc.facts.world_size
    if model is None or ranks is None or doc.precision == "fp32":
        return
    count = model.num_parameters
    parts = ", ".join(f"stage {stage} {state_bytes(count, stage, ranks) / 1e9:.1f}" for stage in range(4))
    yield note(
        f"{_ZERO}.stage",
        f"weights, gradients and Adam's state of {count / 1e9:.1f} B parameters over {ranks} ranks, GB a GPU: {parts}",
        "16 bytes a parameter before sharding; activations, buffers and caches come on top",
        "",
        "arXiv 1910.02054, section 3",
    )
