"""ZeRO-1 over four ranks: DeepSpeed."""

from common import run, start
from deepspeed_job import make_step

run(make_step(1, start()))
