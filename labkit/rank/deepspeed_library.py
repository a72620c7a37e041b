"""DeepSpeed inside a rank: loaded quietly, with operations compiled beforehand, and made to forget dead groups.

DeepSpeed keeps process groups in variables of its modules. After the ranks' groups were built anew these are dead, and
it cannot initialise again before they are reset; whoever tears groups down has `forget_groups` called. It also numbers
modules and parameters, process by process, and its ranks compare the numbers.
"""

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

import torch

from labkit import compiled
from labkit.errors import LabError
from labkit.rank import groups

# Only inference uses it (`inference_all_reduce`), and it makes files in /dev/shm that outlive a killed rank.
_UNUSED = "deepspeed_shm_comm"

# Operations of the environment that Python could not load, and why not.
_unloadable: dict[str, str] = {}

# Variables that hold a group, or what holds one, besides those that DeepSpeed releases by a function of its own.
_HOLDERS = {
    "deepspeed.comm.comm": ("cdb", "nccl_backend", "mpi_backend", "ccl_backend", "hccl_backend"),
    "deepspeed.runtime.pipe.p2p": ("_groups", "_grid"),
    "deepspeed.runtime.activation_checkpointing.checkpointing": ("mpu", "mp_group"),
}


def load() -> ModuleType:
    """Import DeepSpeed without its wall of warnings, once; the accelerator is that of this rank's device.

    Its operations come from the environment. One that is not there raises an error where DeepSpeed would compile it.

    Raises:
        LabError: DeepSpeed is not installed, or cannot be imported.
    """
    if "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", groups.device().type)
        os.environ.setdefault("LOCAL_RANK", "0")  # a rank sees one device
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(compiled.folder()))
    with quiet():
        try:
            deepspeed = importlib.import_module("deepspeed")  # here, not above: it takes every rank a second
            _load_muon()
            builder = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
        except ImportError as error:
            raise LabError(
                f"DeepSpeed cannot be imported ({error}): the layout runs on it. Run `make lab`, or use a layout with "
                "'torch' in its text."
            ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__[_UNUSED] = False
    builder.jit_load = _refuse_to_compile
    for name in compiled.OPERATIONS:
        if name != _UNUSED and name not in builder._loaded_ops and not compiled.why_not(name):
            try:
                builder._loaded_ops[name] = _load_library(name)
                _unloadable.pop(name, None)
            except ImportError as error:  # most layouts do without it
                _unloadable[name] = f"{compiled.library(name)} cannot be loaded ({error}); remove it"
    return deepspeed


def _load_muon() -> None:
    """Import what ZeRO's first start in a process would: Muon's functions, uncompiled.

    They ask torch to compile them while they are defined, which loads all of its compiler: three times what DeepSpeed
    itself takes, and ranks use none of it.
    """
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    decorator, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = decorator


def check_operation(name: str, what: str) -> None:
    """Raise LabError unless an operation is there; `what` says who needs it."""
    if why := compiled.why_not(name) or _unloadable.get(name, ""):
        raise LabError(
            f"DeepSpeed's operation {name} cannot be used: {why}. {what} needs it, and ranks never compile. Run "
            "`labkit compile` (`make lab` does it too), then start the ranks again."
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow what DeepSpeed prints and warns of; errors are raised as ever."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def processor_unasked() -> Iterator[None]:
    """Have DeepSpeed's optimizers not ask which processor this is, as they do to warn of FP16 on AMD's.

    The answer comes from a Python of its own, which takes longer to start than all the rest.
    """
    module: Any = importlib.import_module("cpuinfo")
    ask, module.get_cpu_info = module.get_cpu_info, dict
    try:
        yield
    finally:
        module.get_cpu_info = ask


def forget_groups() -> None:
    """Reset every variable in which DeepSpeed keeps a process group, so that it can initialise again.

    These are all of DeepSpeed 0.19.8; harmless where it was not loaded or has initialised nothing. Its numbers begin
    anew, for a rank that was restarted has none yet.
    """
    if "deepspeed" not in sys.modules:
        return
    sys.modules["deepspeed.utils.groups"]._release_process_group_references()  # type: ignore[attr-defined]
    for name, variables in _HOLDERS.items():
        other = sys.modules.get(name)
        for variable in variables if other is not None else ():
            setattr(other, variable, None)
    _number_from((0, 0))


def enter_world(backend: Any) -> None:
    """Make the ranks of a backend DeepSpeed's world; what it knew of others is forgotten."""
    forget_groups()
    sys.modules["deepspeed.comm.comm"].cdb = backend  # type: ignore[attr-defined]
    sys.modules["deepspeed.utils.groups"]._WORLD_GROUP = backend.get_world_group()  # type: ignore[attr-defined]


def forget_module(module: object) -> None:
    """Take a module from the stack in which ZeRO-3 keeps every one that it was ever given, with its parameters."""
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is not None:
        offload.FWD_MODULE_STACK[:] = [one for one in offload.FWD_MODULE_STACK if one is not module]


def give_back_linear() -> None:
    """Have torch use its own linear again: ZeRO-3, unless told otherwise, replaces it in the whole process, for good.

    The other one computes gradients in another order. Where ranks differ in it (one was restarted, or only some ran
    ZeRO-3), ZeRO-2 adds up gradients of different parameters and says nothing, and tensor-parallel ranks wait forever.
    """
    zero = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if zero is not None and torch.nn.functional.linear is zero.zero3_linear_wrap:
        torch.nn.functional.linear = zero.InsertPostInitMethodToModuleSubClasses.linear_bk


@contextlib.contextmanager
def through(backend: object) -> Iterator[None]:
    """Have DeepSpeed talk through a backend, whatever it talks through otherwise."""
    core = sys.modules["deepspeed.comm.comm"]
    other, core.cdb = core.cdb, backend  # type: ignore[attr-defined]
    try:
        yield
    finally:
        core.cdb = other  # type: ignore[attr-defined]


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Have DeepSpeed know of no groups for a while; what it knew is back on the way out, and so is torch's linear.

    For ranks that train without the others, who learn nothing of it: ranks make groups together, and compare numbers.
    """
    holders = {**_HOLDERS, "deepspeed.utils.groups": tuple(_variables(sys.modules["deepspeed.utils.groups"]))}
    before = [
        (module, name, value.copy() if isinstance(value, dict) else value)
        for module, names in ((sys.modules.get(one), names) for one, names in holders.items())
        if module is not None
        for name, value in ((name, getattr(module, name)) for name in names)
    ]
    numbers = _module_count()[0], sys.modules["deepspeed"].zero.Init.param_id
    forget_groups()
    try:
        yield
    finally:
        give_back_linear()
        forget_groups()
        for module, name, value in before:
            setattr(module, name, value)
        _number_from(numbers)


def _variables(module: ModuleType) -> Iterator[str]:
    """The names of a module that hold neither functions and classes nor other modules."""
    for name, value in vars(module).items():
        if not name.startswith("__") and not callable(value) and not isinstance(value, ModuleType):
            yield name


def _number_from(first: tuple[int, int]) -> None:
    """Number the next modules and parameters of ZeRO-3 from here on: it refuses ranks that are not at the same."""
    _module_count()[0], sys.modules["deepspeed"].zero.Init.param_id = first


def _module_count() -> list[int]:
    """DeepSpeed keeps it as the default value of an argument."""
    offload = sys.modules["deepspeed.runtime.zero.parameter_offload"].DeepSpeedZeRoOffload
    (count,) = offload._register_deepspeed_module.__defaults__
    return count  # type: ignore[no-any-return]


def _load_library(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, compiled.library(name))
    if specification is None or specification.loader is None:
        raise LabError(f"{compiled.library(name)} is no library that Python can load. Run `labkit compile`.")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _refuse_to_compile(builder: Any, verbose: bool = True) -> NoReturn:
    """Stands in for DeepSpeed's compilation on first use, which takes minutes and waits on locks of killed builds."""
    if builder.name in compiled.OPERATIONS:
        check_operation(builder.name, "What was called")
    raise LabError(
        f"DeepSpeed's operation {builder.name} is not one that labkit compiles: ranks never compile. Use what does "
        "without it, such as torch's own optimizer (torch_adam)."
    )


groups.on_tear_down(forget_groups)
