"""Lays two traces side by side."""

from labkit.compare.comparison import Cause, Comparison
from labkit.compare.gaps import gaps
from labkit.compare.rows import rows
from labkit.compare.step import chosen, read
from labkit.compare.words import Found, sentence, text
from labkit.spec.checks import whole
from labkit.trace import Trace

__all__ = ["traces"]


def traces(predicted: Trace, measured: Trace, *, step: int | None = None, num_cores: int | None = None) -> Comparison:
    """Compare a step of one trace with a step of another, and name what makes them differ.

    A prediction and a run, or two of either. The step time's difference is split into gaps: the first step is replayed
    with the second's slow stages, late ranks, messages and collectives put in one after the other, largest first, so
    they add up to all of it. Steps of different schedules are split by what their ranks do on average.

    Args:
        predicted: what was expected, or the first of two runs.
        measured: what happened, or the second.
        step: the step of the run, and of the prediction where it has several; None = of median length.
        num_cores: of the machine that ran it, if known: more ranks than that share them.

    Returns:
        Rows, causes and a sentence.

    Raises:
        PlanError: no trace, one without events, or a step that is not there.

    >>> from labkit import plan, predict
    >>> from labkit.spec import Layout, Model
    >>> built = plan.build(Model.preset("tiny"), Layout.parse("pp2 m4"))
    >>> even = predict.timeline(built, forward_s=0.02, backward_s=0.04)
    >>> uneven = predict.timeline(built, forward_s=[0.02, 0.03], backward_s=[0.04, 0.06])
    >>> found = traces(even, uneven)
    >>> round(found.step_time.measured, 3), [(cause.stage, round(cause.share, 3)) for cause in found.causes]
    (0.42, [(1, 1.0)])
    """
    cores = None if num_cores is None else whole("num_cores", num_cores)
    first, second = chosen("predicted", predicted, step, is_alone=True), chosen("measured", measured, step)
    one, two = read(first), read(second)
    listed, has_replay = gaps(one, two)
    found = Found(one, two, listed, cores, has_replay)
    difference_s = two.time_s - one.time_s
    causes = tuple(
        Cause(
            **gap.place._asdict(),
            seconds=gap.seconds,
            share=gap.seconds / difference_s if difference_s else 0.0,
            text=text(found, gap),
            spans=gap.spans,
        )
        for gap in found.gaps
    )
    return Comparison(
        predicted=first, measured=second, rows=tuple(rows(one, two)), causes=causes, sentence=sentence(found)
    )
