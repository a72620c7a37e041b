"""Asks the installed DeepSpeed itself, in a process of its own: what it reads, and what it refuses.

Reads a JSON list of configurations from standard input, and writes one JSON object: the fields of its models, the names
that it looks up, and for each configuration its error or null.
"""

import contextlib
import enum
import io
import json
import logging
import os
import sys
import warnings

SECTIONS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": (
        "deepspeed.runtime.zero.offload_config",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    "zero_optimization.zenflow": ("deepspeed.runtime.zenflow.zenflow_config", "ZenFlowConfig"),
    "zero_optimization.leaf_module": ("deepspeed.runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "tensor_parallel.tp": ("deepspeed.runtime.tensor_parallel.config", "TPConfig"),
    "timers.throughput": ("deepspeed.utils.config", "DeepSpeedThroughputTimerConfig"),
    "hybrid_engine": ("deepspeed.runtime.config", "HybridEngineConfig"),
    "weight_quantization": ("deepspeed.inference.config", "WeightQuantConfig"),
}
LOOKED_INTO = ("checkpoint", "data_types", "aio", "activation_checkpointing", "flops_profiler", "torch_autocast")


class Asked(dict):
    """A configuration that keeps which names were looked up."""

    def __init__(self, values, prefix, names):
        super().__init__(values)
        self.prefix, self.names = prefix, names

    def __getitem__(self, name):
        self.names.add(self.prefix + name)
        return super().__getitem__(name)

    def __contains__(self, name):
        self.names.add(self.prefix + name)
        return super().__contains__(name)

    def get(self, name, default=None):
        self.names.add(self.prefix + name)
        return super().get(name, default)

    def keys(self):
        return self

    def __copy__(self):
        return self


def fields():
    found = {}
    for section, (module, name) in SECTIONS.items():
        model = getattr(__import__(module, fromlist=[name]), name)
        for field, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True)
            if isinstance(default, enum.Enum):
                default = default.value
            if not isinstance(default, str | int | float | bool | list | dict | None):
                default = str(default) if not hasattr(default, "model_fields") else None
            path = f"{section}.{info.alias or field}"
            found[path] = default
            if info.json_schema_extra and info.json_schema_extra.get("deprecated"):
                found[path] = default
    return found


def looked_up(config_class):
    names = set()
    config = Asked({"train_micro_batch_size_per_gpu": 1}, "", names)
    for section in LOOKED_INTO:
        dict.__setitem__(config, section, Asked({}, f"{section}.", names))
    dict.__setitem__(config["checkpoint"], "writer", Asked({}, "checkpoint.writer.", names))
    dict.__setitem__(config, "optimizer", Asked({"type": "AdamW", "params": {}}, "optimizer.", names))
    dict.__setitem__(config, "scheduler", Asked({"type": "WarmupLR", "params": {}}, "scheduler.", names))
    config_class(config)
    return sorted(names)


def refusal(config_class, config):
    try:
        config_class(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def main():
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["DS_ACCELERATOR"] = "cpu"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        import deepspeed
        from deepspeed.runtime import config as module

        answer = {
            "version": deepspeed.__version__,
            "fields": fields(),
            "looked_up": looked_up(module.DeepSpeedConfig),
            "removed": [
                *module._REMOVED_TOP_LEVEL_CONFIG_KEYS,
                *(f"zero_optimization.{name}" for name in module._REMOVED_ZERO_CONFIG_KEYS),
            ],
            "refusals": [refusal(module.DeepSpeedConfig, config) for config in json.load(sys.stdin)],
        }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
