"""What DeepSpeed and Trainer say when a configuration is wrong, and what it means."""

import re
from collections.abc import Iterator

from labkit.configuration.finding import Finding, mistake, note, risk

__all__ = ["check_messages"]

_ZERO = "zero_optimization"

# Pattern in the text -> path, rule, fix, source. The match is the fact.
_KNOWN: tuple[tuple[str, str, str, str, str], ...] = (
    (
        r"ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
        f"{_ZERO}.stage",
        "the pipeline engine refuses ZeRO 2 and 3",
        "Use stage 1 or 0.",
        "DeepSpeed issues 568 and 823",
    ),
    (
        r"ZeRO-Offload with a client provided optimizer \([^)]{0,80}\)",
        f"{_ZERO}.offload_optimizer",
        "with optimizer offload the step runs on the CPU, and DeepSpeed wants its own CPU optimizer",
        "Add an optimizer section, pass DeepSpeedCPUAdam, or set zero_force_ds_cpu_optimizer to false.",
        "deepspeed/runtime/engine.py",
    ),
    (
        r"ZeRO Offload can only work with DeepSpeed optimizers",
        f"{_ZERO}.offload_optimizer",
        "older Trainers take offload only with an optimizer section",
        "Add an optimizer section of type AdamW.",
        "transformers issue 11044",
    ),
    (
        r"using an untested ZeRO Optimizer",
        "zero_allow_untested_optimizer",
        "ZeRO takes Adam, AdamW, Adagrad, Lion and Muon unasked",
        "Set zero_allow_untested_optimizer to true.",
        "deepspeed/runtime/engine.py",
    ),
    (
        r"bfloat16 and fp16 modes cannot be simultaneously enabled",
        "bf16.enabled",
        "a model has one precision",
        "Switch one off.",
        "deepspeed/runtime/config.py",
    ),
    (
        r"Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
        "train_batch_size",
        "DeepSpeed computes the other from it",
        "Add train_micro_batch_size_per_gpu.",
        "deepspeed/runtime/config.py",
    ),
    (
        r"'>' not supported between instances of 'str' and '(?:int|float)'",
        "",
        "DeepSpeed compares a text with a number: a value in quotes, or an 'auto' that nobody filled in",
        "Write numbers without quotes; 'auto' only where Trainer or Accelerate reads the file.",
        "DeepSpeed issue 1270",
    ),
    (
        r"zero stage \d requires an optimizer",
        "optimizer",
        "ZeRO 1 and 2 shard an optimizer's state",
        "Pass an optimizer, or add an optimizer section.",
        "deepspeed/runtime/engine.py",
    ),
    (
        r"'DeepSpeedZeRoOffload' object has no attribute 'backward'",
        "optimizer",
        "without an optimizer stage 3 only gathers weights, for inference",
        "Pass an optimizer, or add an optimizer section.",
        "DeepSpeed issue 3024",
    ),
    (
        r"More elements \d+ than buffer size [\d,]+",
        f"{_ZERO}.offload_param.buffer_size",
        "a rank's part of a parameter must fit into one NVMe buffer",
        "Raise offload_param.buffer_size above the first number.",
        "DeepSpeed issue 3506",
    ),
    (
        r"Unable to find latest file at [^\n,]{0,160}",
        "",
        "load_checkpoint takes the folder above the tag; with the tag inside, training starts from scratch",
        "Give load_dir without global_step..., and the tag by itself.",
        "deepspeed/runtime/engine.py load_checkpoint",
    ),
    (
        r"loaded used a DP world size of \d+ but the current world size is \d+",
        f"{_ZERO}.elastic_checkpoint",
        "a ZeRO checkpoint belongs to its number of ranks",
        "Convert it with ds_to_universal.py and set checkpoint.load_universal.",
        "deepspeed/runtime/engine.py",
    ),
    (
        r"size mismatch for [^\n]{0,120}torch\.Size\(\[0\]\)",
        f"{_ZERO}.stage",
        "under stage 3 a weight outside its layer's forward is an empty placeholder",
        "Load inside deepspeed.zero.GatheredParameters, or through from_pretrained with the configuration set first.",
        "deepspeed.readthedocs.io zero3",
    ),
    (
        r"neither `hidden_size` nor `hidden_sizes`",
        f"{_ZERO}.reduce_bucket_size",
        "Trainer computes 'auto' buckets from the model's hidden size, and this model's configuration names none",
        "Write numbers for reduce_bucket_size, stage3_prefetch_bucket_size and stage3_param_persistence_threshold.",
        "transformers/integrations/deepspeed.py",
    ),
    (
        r"'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'",
        f"{_ZERO}.offload_optimizer",
        "its C++ part was not built: look for the first error above",
        "Install ninja, a C++ compiler and the CUDA toolkit of torch's version.",
        "deepspeed/ops/adam/cpu_adam.py",
    ),
    (
        r"Unable to JIT load the [^\n]{0,60} op",
        "",
        "DeepSpeed compiles its operations at first use",
        "Install ninja and a C++ compiler.",
        "deepspeed/ops/op_builder/builder.py",
    ),
    (
        r"`deepspeed_config_file`, the following accelerate config variables will be ignored",
        "",
        "Accelerate takes those from the DeepSpeed file",
        "Remove them from the Accelerate configuration, or set them to 'auto' in the file.",
        "accelerate/utils/dataclasses.py",
    ),
    (
        r"Please specify the ZeRO optimization config in the DeepSpeed config",
        _ZERO,
        "Accelerate asks for a zero_optimization section",
        "Add zero_optimization with a stage.",
        "accelerate/utils/dataclasses.py",
    ),
    (
        r"DeepSpeed Zero-3 is not compatible with [^\n]{0,80}",
        f"{_ZERO}.stage",
        "under stage 3 weights are sharded as they are made, and nothing else may place them",
        "Drop device_map and low_cpu_mem_usage, or use stage 2.",
        "transformers/modeling_utils.py",
    ),
    (
        r"pass at least one of training or evaluation dataloaders",
        "train_micro_batch_size_per_gpu",
        "Accelerate fills in 'auto' from a loader's batch_size",
        "Pass a loader to accelerator.prepare(), or write a number.",
        "accelerate/accelerator.py",
    ),
    (
        r"Do not set `gradient_accumulation_steps` in the DeepSpeed config",
        "gradient_accumulation_steps",
        "Lightning sets it from accumulate_grad_batches",
        "Take it out of the file.",
        "Lightning issue 19891",
    ),
    (
        r"exits with return code = -9|\(exitcode: -9\)",
        f"{_ZERO}.offload_optimizer",
        "signal 9 without a traceback is mostly the kernel, out of host memory: offload, pinned memory and a whole "
        "model loaded in every process take it",
        "Count 12 bytes a parameter for an offloaded optimizer and 2 for parameters over the ranks of a node.",
        "DeepSpeed issue 4571",
    ),
    (
        r"One or more batch related parameters were found in your ds_config",
        "elasticity",
        "elastic training chooses the batch sizes itself",
        "Take train_batch_size, micro-batch and accumulation out, or elasticity (gone in DeepSpeed 0.19).",
        "deepspeed/elasticity",
    ),
    (
        r"CUDA version [\d.]+ does not match the version torch was compiled with [\d.]+",
        "",
        "DeepSpeed compiles its operations with the CUDA toolkit, which must be of torch's major version",
        "Install the toolkit of torch's version; DS_SKIP_CUDA_CHECK=1 only skips the check.",
        "deepspeed/ops/op_builder/builder.py",
    ),
    (
        r"compute_grad_norm=false requires gradient_clipping=0",
        f"{_ZERO}.compute_grad_norm",
        "clipping needs the norm",
        "Set gradient_clipping to 0.",
        "deepspeed/runtime/zero/stage_1_and_2.py",
    ),
)
_PRODUCT = re.compile(r"(\d+)\s*!=\s*(\d+)\s*\*\s*(\d+)\s*\*\s*(\d+)")
_MISMATCH = re.compile(r"- ds (\S+?)=(.{1,40}?) vs hf (.{1,60}?)=([^\n]{1,40})")
_EXTRA = re.compile(r"(\w+)\s*\n?\s*(?:Extra inputs are not permitted|extra fields not permitted)")


def check_messages(words: str, *, knows_batch: bool = False) -> Iterator[Finding]:
    """Explain error messages in a text.

    Args:
        words: an error message, or a log.
        knows_batch: whether the batch product is judged already.
    """
    for pattern, path, rule, fix, source in _KNOWN:
        if match := re.search(pattern, words):
            yield mistake(path, f"the message is: {match[0].strip()[:160]}", rule, fix, source)
    if not knows_batch and (match := _PRODUCT.search(words)):
        yield _product(*(int(one) for one in match.groups()))
    for match in list(_MISMATCH.finditer(words))[:10]:
        name, value, theirs, other = (one.strip() for one in match.groups())
        rule = "Trainer refuses a DeepSpeed value that differs from its own argument"
        fix = f"Set {name} to 'auto', or make both equal."
        yield mistake(name, f"{name}={value}, and {theirs}={other}", rule, fix, "transformers pull request 12021")
    names = list(dict.fromkeys(match[1] for match in _EXTRA.finditer(words)))
    if names:
        rule = "sections take the keys of the installed DeepSpeed only: it is misspelt, misplaced or of another version"
        yield mistake(
            names[0], f"DeepSpeed refuses {', '.join(names[:5])}", rule, "Correct it, or change DeepSpeed's version."
        )
    yield from _loss_scale(words)


def _product(total: int, micro: int, steps: int, ranks: int) -> Finding:
    fix = f"Use train_batch_size={micro * steps * ranks}"
    if steps and total % (micro * steps) == 0:
        fix += f", or {total // (micro * steps)} data-parallel ranks"
    if ranks == 1:
        fix += "; DeepSpeed saw 1 rank: start with deepspeed, torchrun or accelerate launch, and form the group before "
        fix += "the configuration is read"
    rule = "train_batch_size = micro-batch * accumulation * data-parallel ranks"
    fact = f"{total} != {micro} * {steps} * {ranks} = {micro * steps * ranks}"
    return mistake("train_batch_size", fact, rule, f"{fix}.", "deepspeed/runtime/config.py _batch_assertion")


def _loss_scale(words: str) -> Iterator[Finding]:
    skipped = len(re.findall(r"OVERFLOW!", words))
    if "Current loss scale already at minimum" in words:
        yield mistake(
            "fp16.enabled",
            "the loss scale fell to its floor, and DeepSpeed ended the run",
            "every step overflowed in float16, which ends at 65,504: so it goes with weights trained in bfloat16, NaN "
            "in the data, or too high a rate",
            "Use bf16 (bf16.enabled, torch_dtype=bfloat16) on a GPU that has it; a lower min_loss_scale only hides it.",
            "Chinese-LLaMA-Alpaca issue 534, DeepSpeedExamples issue 418",
        )
    elif skipped > 3:
        rule = "each one is a step without an update; a few at the start are normal, going on they are not"
        yield risk("fp16.enabled", f"{skipped} steps skipped for overflow", rule, "Use bf16, or a lower rate.")
    elif skipped:
        rule = "the dynamic loss scale finds its level so"
        yield note("fp16.enabled", f"{skipped} step{'s' if skipped > 1 else ''} skipped for overflow", rule)
