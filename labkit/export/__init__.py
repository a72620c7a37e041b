"""Plan -> what other programs read: DeepSpeed's JSON, Megatron-LM's arguments, torchtitan's settings."""

from labkit.export.to_deepspeed import deepspeed
from labkit.export.to_megatron import Arguments, megatron
from labkit.export.to_torchtitan import torchtitan

__all__ = ["Arguments", "deepspeed", "megatron", "torchtitan"]
