"""A DeepSpeed configuration read and judged, without torch and without DeepSpeed."""

from labkit.configuration.document import Document
from labkit.configuration.facts import Facts
from labkit.configuration.finding import SEVERITIES, Field, Finding, by_severity, mistake, note, risk
from labkit.configuration.messages import check_messages
from labkit.configuration.offload import state_bytes
from labkit.configuration.review import Review, review
from labkit.configuration.syntax import parse

__all__ = [
    "SEVERITIES",
    "Document",
    "Facts",
    "Field",
    "Finding",
    "Review",
    "by_severity",
    "check_messages",
    "mistake",
    "note",
    "parse",
    "review",
    "risk",
    "state_bytes",
]
