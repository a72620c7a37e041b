"""Judge a machine from its facts: what is fine, what is wrong, what blocks the lab, and the next step for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from labkit.doctor_facts import Facts

__all__ = ["Finding", "judge", "report"]

Level = Literal["fine", "note", "wrong", "blocks"]

OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)
OLDEST_TORCH = (2, 11)
# The oldest Linux driver that runs builds of a CUDA major version ("minor version compatibility", NVIDIA's CUDA
# compatibility guide).
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
GIB = 1 << 30
RANK_MEMORY_BYTES = GIB // 2  # a rank with torch loaded and a small model
FILES_PER_RANK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One judgement.

    Attributes:
        topic: what was looked at.
        level: "fine", "note" (works, worth knowing), "wrong" (some things will not work), "blocks" (the lab will not).
        fact: what was found.
        next_step: what to do about it; "" when nothing is wrong.
    """

    topic: str
    level: Level
    fact: str
    next_step: str = ""


def judge(facts: Facts, *, num_ranks: int = 4) -> list[Finding]:
    """Judge the facts for somebody who wants to run this many ranks: one finding per topic, in a fixed order."""
    return [
        _python(facts),
        _packages(facts),
        _torch(facts),
        _gpus(facts, num_ranks),
        _driver(facts),
        _nccl(facts, num_ranks),
        _ports(facts),
        _hostname(facts),
        _disk(facts),
        _shared_memory(facts, num_ranks),
        _memory(facts, num_ranks),
        _cores(facts, num_ranks),
        _open_files(facts, num_ranks),
        _compiler(facts),
        _operations(facts),
        _git(facts),
        _bubblewrap(facts),
    ]


def report(findings: Sequence[Finding]) -> str:
    """The findings as lines for a terminal, and a last line that sums them up."""
    width = max(len(one.topic) for one in findings)
    lines = []
    for one in findings:
        lines.append(f"{one.topic:<{width}}  {one.level:<6}  {one.fact}")
        if one.next_step:
            lines.append(f"{'':<{width}}  {'':<6}  next: {one.next_step}")
    blocking = [one.topic for one in findings if one.level == "blocks"]
    wrong = [one.topic for one in findings if one.level == "wrong"]
    if blocking:
        lines.append(f"\nThe lab will not run before this is put right: {', '.join(blocking)}.")
    elif wrong:
        lines.append(f"\nThe lab runs; this limits it: {', '.join(wrong)}.")
    else:
        lines.append("\nThe lab runs here.")
    return "\n".join(lines)


def _python(facts: Facts) -> Finding:
    text = ".".join(map(str, facts.python))
    if facts.platform == "win32":
        return Finding(topic="Python", level="blocks", fact="Windows", next_step="run labkit inside WSL")
    if facts.python[:2] < OLDEST_PYTHON:
        step = "install Python 3.11, 3.12 or 3.13, remove .venv, then `PYTHON=python3.12 make lab`"
        return Finding(topic="Python", level="blocks", fact=f"{text}, older than 3.11", next_step=step)
    if facts.python[:2] > NEWEST_PYTHON:
        step = "if something fails, use Python 3.11 to 3.13"
        return Finding(topic="Python", level="note", fact=f"{text}, newer than labkit is meant for", next_step=step)
    return Finding(topic="Python", level="fine", fact=f"{text} in {facts.prefix}")


def _packages(facts: Facts) -> Finding:
    missing = [name for name, version in facts.packages.items() if not version]
    if missing:
        step = "`make lab` installs them into .venv (conda: `pip install -e . -c constraints.txt`)"
        return Finding(topic="packages", level="blocks", fact=f"missing: {', '.join(missing)}", next_step=step)
    if not facts.launchers_registered:
        step = "install labkit itself: `pip install --no-deps -e .` in its folder"
        fact = "ipyparallel does not know labkit's launchers: labkit is not installed here"
        return Finding(topic="packages", level="blocks", fact=fact, next_step=step)
    shown = ("deepspeed", "ipyparallel", "jupyterlab", "plotly")
    versions = ", ".join(f"{name} {facts.packages[name]}" for name in shown if name in facts.packages)
    return Finding(topic="packages", level="fine", fact=versions)


def _torch(facts: Facts) -> Finding:
    torch = facts.torch
    if not torch.version:
        step = "remove .venv and run `make lab`; on a machine without a GPU, TORCH_INDEX= takes the small CPU build"
        return Finding(topic="torch", level="blocks", fact=f"cannot be imported: {torch.error}", next_step=step)
    build = f"built for CUDA {torch.cuda_build}" if torch.cuda_build else "CPU build"
    if _numbers(torch.version) < OLDEST_TORCH:
        step = "`make lab` installs the version of constraints.txt"
        return Finding(topic="torch", level="blocks", fact=f"{torch.version}, older than 2.11", next_step=step)
    if not torch.gloo:
        step = "install PyTorch's own build: `make lab`"
        return Finding(topic="torch", level="blocks", fact=f"{torch.version} without gloo", next_step=step)
    return Finding(topic="torch", level="fine", fact=f"{torch.version}, {build}")


def _gpus(facts: Facts, num_ranks: int) -> Finding:
    if facts.driver_error:
        step = "the driver does not answer: reboot after a driver update, else install the driver again"
        return Finding(topic="GPUs", level="wrong", fact=facts.driver_error, next_step=step)
    if not facts.gpus:
        return Finding(topic="GPUs", level="fine", fact="none: ranks are CPU processes that talk gloo")
    first = facts.gpus[0]
    fact = f"{len(facts.gpus)} x {first.name}, {first.memory_bytes / GIB:.0f} GiB"
    if not facts.torch.version:
        return Finding(topic="GPUs", level="note", fact=f"{fact}; torch is missing", next_step="see torch, above")
    if not facts.torch.cuda_build:
        step = "for NCCL ranks, remove .venv and run `make lab` without TORCH_INDEX"
        return Finding(topic="GPUs", level="wrong", fact=f"{fact}, but torch is a CPU build", next_step=step)
    if facts.torch.num_devices == 0 and _driver_fits(facts):
        step = "look at CUDA_VISIBLE_DEVICES and at who may read /dev/nvidia* (a container needs `--gpus all`)"
        return Finding(topic="GPUs", level="wrong", fact=f"{fact}, but torch can use none", next_step=step)
    if facts.torch.num_devices < num_ranks:
        usable = facts.torch.num_devices
        step = f"start at most {usable} ranks for NCCL" if usable else "see driver, below"
        fact = f"{fact}; {num_ranks} ranks need {num_ranks} for NCCL and {usable} can be used: gloo on the CPU instead"
        return Finding(topic="GPUs", level="note", fact=fact, next_step=step)
    return Finding(topic="GPUs", level="fine", fact=f"{fact}: one rank each, NCCL")


def _driver_fits(facts: Facts) -> bool:
    """Whether the driver runs programs of torch's CUDA major version; True where either is unknown."""
    major = _numbers(facts.torch.cuda_build)[:1]
    if not major or not facts.driver:
        return True
    if facts.driver_cuda:
        return _numbers(facts.driver_cuda)[:1] >= major
    return _numbers(facts.driver) >= OLDEST_DRIVER.get(major[0], (0,))


def _driver(facts: Facts) -> Finding:
    if not facts.driver:
        return Finding(topic="driver", level="fine", fact="no NVIDIA driver, none needed on CPU ranks")
    runs = f", runs CUDA up to {facts.driver_cuda}" if facts.driver_cuda else ""
    fact = f"{facts.driver}{runs}"
    if _driver_fits(facts):
        return Finding(topic="driver", level="fine", fact=fact)
    major = _numbers(facts.torch.cuda_build)[0]
    oldest = ".".join(map(str, OLDEST_DRIVER.get(major, ())))
    at_least = f" to {oldest} or newer" if oldest else ""
    has = _numbers(facts.driver_cuda)[:1]
    other = f", or install a torch build for CUDA {has[0]} (TORCH_INDEX=)" if has else ""
    fact = f"{fact}, but torch is built for CUDA {facts.torch.cuda_build}: a driver runs no newer major version"
    return Finding(topic="driver", level="wrong", fact=fact, next_step=f"update the driver{at_least}{other}")


def _nccl(facts: Facts, num_ranks: int) -> Finding:
    if facts.torch.nccl:
        return Finding(topic="NCCL", level="fine", fact=facts.torch.nccl)
    if facts.gpus and facts.torch.cuda_build and len(facts.gpus) >= min(num_ranks, 2):
        step = "install PyTorch's own CUDA build: remove .venv, `make lab`"
        return Finding(topic="NCCL", level="wrong", fact="this CUDA build of torch has none", next_step=step)
    return Finding(topic="NCCL", level="fine", fact="none, not needed on CPU ranks")


def _ports(facts: Facts) -> Finding:
    if facts.num_free_ports == 0:
        step = "let programs listen on 127.0.0.1 (a firewall or sandbox forbids it) or free some ports"
        return Finding(topic="ports", level="blocks", fact="no port on 127.0.0.1 can be used", next_step=step)
    return Finding(topic="ports", level="fine", fact="127.0.0.1 listens and connects")


def _hostname(facts: Facts) -> Finding:
    if not facts.hostname_resolves:
        step = f"add `127.0.0.1 {facts.hostname}` to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        return Finding(topic="host name", level="wrong", fact=f"{facts.hostname} has no address", next_step=step)
    return Finding(topic="host name", level="fine", fact=facts.hostname)


def _disk(facts: Facts) -> Finding:
    fact = f"{facts.disk_free_bytes / GIB:.1f} GiB free here, {facts.tmp_free_bytes / GIB:.1f} GiB for temporary files"
    least = min(facts.disk_free_bytes, facts.tmp_free_bytes)
    if least < GIB // 10:
        return Finding(topic="disk", level="blocks", fact=fact, next_step="free at least 1 GiB of each")
    if least < GIB:
        return Finding(topic="disk", level="wrong", fact=fact, next_step="free 1 GiB: checkpoints and traces need room")
    return Finding(topic="disk", level="fine", fact=fact)


def _shared_memory(facts: Facts, num_ranks: int) -> Finding:
    if facts.shm_bytes is None:
        return Finding(topic="/dev/shm", level="fine", fact="none on this system, not needed by gloo")
    fact = f"{facts.shm_bytes / GIB:.2f} GiB"
    if facts.shm_bytes < GIB // 2:
        step = "in a container: `--shm-size=2g`, or `--ipc=host`"
        level: Level = "wrong" if facts.torch.num_devices >= min(num_ranks, 2) else "note"
        return Finding(topic="/dev/shm", level=level, fact=f"{fact}: NCCL and data loaders need more", next_step=step)
    return Finding(topic="/dev/shm", level="fine", fact=fact)


def _memory(facts: Facts, num_ranks: int) -> Finding:
    fact = f"{facts.memory_bytes / GIB:.1f} GiB available"
    wanted = num_ranks * RANK_MEMORY_BYTES
    if facts.memory_bytes < wanted:
        fitting = facts.memory_bytes // RANK_MEMORY_BYTES
        step = f"close other programs, or start {fitting} ranks" if fitting else "close other programs"
        fact = f"{fact}; {num_ranks} ranks take about {wanted / GIB:.1f} GiB"
        return Finding(topic="memory", level="wrong", fact=fact, next_step=step)
    return Finding(topic="memory", level="fine", fact=fact)


def _cores(facts: Facts, num_ranks: int) -> Finding:
    if facts.num_cores < num_ranks and facts.torch.num_devices < num_ranks:
        step = "give runs a pace (`pace=`), so that durations are as declared; or start fewer ranks"
        fact = f"{facts.num_cores} for {num_ranks} ranks: they take turns, so timelines show the queue for cores"
        return Finding(topic="cores", level="note", fact=fact, next_step=step)
    return Finding(topic="cores", level="fine", fact=f"{facts.num_cores} for {num_ranks} ranks")


def _open_files(facts: Facts, num_ranks: int) -> Finding:
    wanted = 256 + FILES_PER_RANK * num_ranks
    if facts.max_open_files < wanted:
        fact = f"{facts.max_open_files} allowed, {num_ranks} ranks may need {wanted}"
        return Finding(topic="open files", level="wrong", fact=fact, next_step=f"`ulimit -n {max(4096, wanted)}`")
    return Finding(topic="open files", level="fine", fact=f"{facts.max_open_files} allowed")


def _compiler(facts: Facts) -> Finding:
    missing = [
        name
        for name, there in (
            ("a C++ compiler", facts.compiler),
            ("ninja", facts.ninja),
            ("Python.h", facts.python_headers),
        )
        if not there
    ]
    if missing:
        version = ".".join(map(str, facts.python[:2]))
        step = f"DeepSpeed builds its operators with them: apt-get install g++ python{version}-dev; `pip install ninja`"
        return Finding(topic="compiler", level="note", fact=f"missing: {', '.join(missing)}", next_step=step)
    return Finding(topic="compiler", level="fine", fact=f"{facts.compiler}, ninja, Python.h")


def _operations(facts: Facts) -> Finding:
    if facts.platform != "linux":
        return Finding(topic="DeepSpeed", level="fine", fact="not used on this system: layouts run on torch")
    if facts.operations:
        fact = f"its operations are not compiled ({facts.operations}): layouts with offload:optimizer need them"
        return Finding(topic="DeepSpeed", level="note", fact=fact, next_step="`labkit compile`; `make lab` does it too")
    return Finding(topic="DeepSpeed", level="fine", fact="its operations are compiled")


def _git(facts: Facts) -> Finding:
    if not facts.git:
        return Finding(topic="git", level="note", fact="missing", next_step="install git to update labkit")
    return Finding(topic="git", level="fine", fact=facts.git)


def _bubblewrap(facts: Facts) -> Finding:
    if facts.platform != "linux":
        return Finding(topic="sandbox", level="fine", fact="none on this system: grade submissions on Linux")
    if not facts.bubblewrap:
        step = "to grade submissions: apt-get install bubblewrap (0.8 or newer)"
        return Finding(topic="sandbox", level="note", fact="bubblewrap is missing", next_step=step)
    return Finding(topic="sandbox", level="fine", fact=facts.bubblewrap)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" gives (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: next((place for place, sign in enumerate(part) if not sign.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
