"""labkit: real ranks, real training steps, from a notebook. `import labkit as lk`; submodules load on first use."""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_SUBMODULES = frozenset(
    {
        "checks",
        "cluster",
        "compare",
        "configuration",
        "errors",
        "exercise",
        "explain",
        "export",
        "formats",
        "grade",
        "launch",
        "measure",
        "plan",
        "predict",
        "schedule",
        "show",
        "spec",
        "trace",
        "widgets",
    }
)

__all__ = sorted([*_SUBMODULES, "__version__"])


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"labkit.{name}")
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
