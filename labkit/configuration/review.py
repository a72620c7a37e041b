"""All rules over one configuration."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from labkit.configuration.automatic import check_automatic
from labkit.configuration.batch import batch_of, check_batch
from labkit.configuration.document import Document, document
from labkit.configuration.facts import Facts
from labkit.configuration.fields import fields_of
from labkit.configuration.finding import Field, Finding, by_severity
from labkit.configuration.kinds import check_kinds
from labkit.configuration.learning_rate import check_learning_rate
from labkit.configuration.messages import check_messages
from labkit.configuration.names import check_names
from labkit.configuration.offload import check_offload
from labkit.configuration.optimizer import check_optimizer
from labkit.configuration.precision import check_precision
from labkit.configuration.restoring import check_restoring
from labkit.configuration.sharding import check_sharding
from labkit.configuration.sizes import check_sizes

__all__ = ["RULES", "Review", "review"]

RULES: tuple[Callable[[Document], Iterable[Finding]], ...] = (
    check_batch,
    check_names,
    check_kinds,
    check_precision,
    check_sharding,
    check_offload,
    check_automatic,
    check_optimizer,
    check_learning_rate,
    check_sizes,
    check_restoring,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """A configuration judged.

    Attributes:
        document: the configuration as read.
        fields: its fields, explained.
        findings: most serious first.
    """

    document: Document
    fields: tuple[Field, ...]
    findings: tuple[Finding, ...]


def review(found: Mapping[str, object], facts: Facts, *, known: Iterable[Finding] = ()) -> Review:
    """Judge an object that was read from a file.

    Args:
        found: the object.
        facts: what is known besides.
        known: findings that reading made.

    >>> done = review({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, Facts(world_size=7))
    >>> done.findings[0].fact
    'train_batch_size=256 is not divisible by micro-batch 2 * 7 ranks = 14: 256 != 2 * 18 * 7 = 252'
    """
    doc = document(found, facts)
    findings = [*known, *(finding for rule in RULES for finding in rule(doc))]
    batch = batch_of(doc)
    said = {one.path for one in findings if one.severity == "mistake"}
    messages = check_messages(doc.facts.words, knows_batch=batch is not None and not batch.fits)
    findings += [one for one in messages if not one.path or one.path not in said]
    return Review(document=doc, fields=fields_of(doc), findings=by_severity(findings))
