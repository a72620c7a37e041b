"""Which backend ranks get, with made-up GPUs."""

import subprocess
from types import SimpleNamespace

import pytest

from labkit.cluster import devices
from labkit.errors import ClusterError

LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
  MIG 1g.18gb     Device  0: (UUID: MIG-cccc)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
"""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs and a torch built for CUDA."""
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=LISTED))
    monkeypatch.setattr(devices, "_torch_cuda", lambda: "12.8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the driver's tools."""

    def fail(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_enough_gpus_give_nccl_one_each() -> None:
    chosen = devices.choose(2, None)
    assert (chosen.backend, chosen.visible, chosen.reason) == ("nccl", ("0", "1"), "2 GPUs for 2 ranks")
    assert devices.choose(1, "nccl").visible == ("0",)


@pytest.mark.usefixtures("two_gpus")
def test_too_few_gpus_give_gloo_and_say_why() -> None:
    chosen = devices.choose(4, None)
    assert (chosen.backend, chosen.visible) == ("gloo", ("",) * 4)
    assert chosen.reason == "2 GPUs for 4 ranks: NCCL takes one GPU a rank"


@pytest.mark.usefixtures("two_gpus")
def test_gloo_can_be_asked_for() -> None:
    chosen = devices.choose(2, "gloo")
    assert (chosen.backend, chosen.reason) == ("gloo", "asked for")


@pytest.mark.usefixtures("two_gpus")
def test_nccl_for_more_ranks_than_gpus_is_refused_with_the_largest_count() -> None:
    with pytest.raises(ClusterError, match=r"2 GPUs for 4 ranks: NCCL takes one GPU a rank. Start at most 2 ranks"):
        devices.choose(4, "nccl")


@pytest.mark.parametrize("backend", [None, "nccl", "gloo"])
def test_a_torch_without_cuda_says_so(backend: str | None, monkeypatch: pytest.MonkeyPatch, two_gpus: None) -> None:
    monkeypatch.setattr(devices, "_torch_cuda", lambda: "")
    if backend == "nccl":
        with pytest.raises(ClusterError, match=r"torch is built without CUDA \(2 GPUs seen\). Use backend='gloo'"):
            devices.choose(2, backend)
    else:
        assert devices.choose(2, backend).backend == "gloo"


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_torch_cuda", lambda: "12.8")
    monkeypatch.setattr(devices, "Path", lambda path: SimpleNamespace(is_dir=lambda: False))
    assert devices.choose(4, None).reason == "0 GPUs for 4 ranks: NCCL takes one GPU a rank"
    with pytest.raises(ClusterError, match="Use backend='gloo'"):
        devices.choose(1, "nccl")


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,1", ["0", "1"]),
        (" 1 , 0 ", ["1", "0"]),
        ("1", ["1"]),
        ("0,-1,1", ["0"]),
        ("0,0", ["0"]),
        ("0,7,1", ["0"]),
        ("GPU-bbbb,GPU-aaaa", ["GPU-bbbb", "GPU-aaaa"]),
        ("GPU-zzzz", []),
        ("MIG-cccc", ["MIG-cccc"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    visible: str, seen: list[str], monkeypatch: pytest.MonkeyPatch, two_gpus: None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices._gpus() == seen


def test_the_cuda_version_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert devices._torch_cuda() == (torch.version.cuda or "")
