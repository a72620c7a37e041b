"""What travels between the notebook and the ranks: the agent's signed messages, and packed calls and results."""

from labkit.wire.channel import Channel, WireError, accept, connect
from labkit.wire.parcel import Outcome, load_outcome, pack_call

__all__ = ["Channel", "Outcome", "WireError", "accept", "connect", "load_outcome", "pack_call"]
