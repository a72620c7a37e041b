"""The doctor's judgements, from made-up facts, and its fact gathering on this machine."""

import dataclasses

import pytest

from labkit import doctor, doctor_facts
from labkit.doctor_facts import Facts, Gpu, Torch

GIB = 1 << 30
H100 = Gpu(name="NVIDIA H100", memory_bytes=80 * GIB)
CPU_TORCH = Torch(version="2.13.0+cpu", gloo=True)
CUDA_TORCH = Torch(version="2.13.0", cuda_build="13.0", num_devices=4, nccl="2.29.3", gloo=True)


def laptop(**changes) -> Facts:
    facts = Facts(
        platform="linux",
        python=(3, 11, 7),
        prefix="/home/ada/labkit/.venv",
        packages=dict.fromkeys(doctor_facts.PACKAGES, "1.0"),
        launchers_registered=True,
        torch=CPU_TORCH,
        gpus=(),
        driver="",
        driver_cuda="",
        driver_error="",
        num_free_ports=16,
        hostname="laptop",
        hostname_resolves=True,
        disk_free_bytes=50 * GIB,
        tmp_free_bytes=50 * GIB,
        shm_bytes=8 * GIB,
        memory_bytes=12 * GIB,
        num_cores=8,
        max_open_files=4096,
        compiler="/usr/bin/c++",
        ninja="/usr/bin/ninja",
        python_headers=True,
        operations="",
        git="/usr/bin/git",
        bubblewrap="/usr/bin/bwrap",
    )
    return dataclasses.replace(facts, **changes)


def server(**changes) -> Facts:
    facts = laptop(torch=CUDA_TORCH, gpus=(H100,) * 4, driver="580.65.06", driver_cuda="13.0")
    return dataclasses.replace(facts, **changes)


def finding(facts, topic, num_ranks=4):
    return next(one for one in doctor.judge(facts, num_ranks=num_ranks) if one.topic == topic)


@pytest.mark.parametrize("facts", [laptop(), server()])
def test_a_good_machine_has_nothing_wrong(facts):
    findings = doctor.judge(facts)
    assert {one.level for one in findings} == {"fine"}
    assert all(not one.next_step for one in findings)
    assert doctor.report(findings).endswith("The lab runs here.")


@pytest.mark.parametrize(
    ("facts", "topic", "level", "in_fact", "in_step"),
    [
        (laptop(python=(3, 10, 2)), "Python", "blocks", "3.10.2, older than 3.11", "PYTHON=python3.12 make lab"),
        (laptop(python=(3, 14, 0)), "Python", "note", "3.14.0", "3.11 to 3.13"),
        (laptop(platform="win32"), "Python", "blocks", "Windows", "WSL"),
        (laptop(packages={"plotly": "", "torch": "2"}), "packages", "blocks", "missing: plotly", "make lab"),
        (laptop(launchers_registered=False), "packages", "blocks", "launchers", "pip install --no-deps -e ."),
        (laptop(torch=Torch(error="no libfoo.so")), "torch", "blocks", "no libfoo.so", "make lab"),
        (laptop(torch=Torch(version="2.9.1", gloo=True)), "torch", "blocks", "2.9.1, older than 2.11", "make lab"),
        (laptop(torch=Torch(version="2.13.0")), "torch", "blocks", "without gloo", "make lab"),
        (laptop(driver_error="nvidia-smi: mismatch"), "GPUs", "wrong", "mismatch", "reboot"),
        (server(torch=CPU_TORCH), "GPUs", "wrong", "torch is a CPU build", "without TORCH_INDEX"),
        (
            server(torch=dataclasses.replace(CUDA_TORCH, num_devices=0)),
            "GPUs",
            "wrong",
            "torch can use none",
            "CUDA_VISIBLE_DEVICES",
        ),
        (server(torch=dataclasses.replace(CUDA_TORCH, nccl="")), "NCCL", "wrong", "has none", "make lab"),
        (laptop(num_free_ports=0), "ports", "blocks", "127.0.0.1", "firewall"),
        (laptop(hostname_resolves=False), "host name", "wrong", "laptop has no address", "127.0.0.1 laptop"),
        (laptop(disk_free_bytes=GIB // 18), "disk", "blocks", "0.1 GiB free here", "free at least 1 GiB"),
        (laptop(tmp_free_bytes=GIB // 2), "disk", "wrong", "0.5 GiB for temporary files", "free 1 GiB"),
        (laptop(shm_bytes=64 << 20), "/dev/shm", "note", "0.06 GiB", "--shm-size"),
        (server(shm_bytes=64 << 20), "/dev/shm", "wrong", "0.06 GiB", "--shm-size"),
        (laptop(shm_bytes=None), "/dev/shm", "fine", "not needed", ""),
        (laptop(memory_bytes=GIB), "memory", "wrong", "4 ranks take about 2.0 GiB", "start 2 ranks"),
        (laptop(num_cores=2), "cores", "note", "2 for 4 ranks", "pace"),
        (laptop(max_open_files=256), "open files", "wrong", "256 allowed, 4 ranks may need 512", "ulimit -n 4096"),
        (laptop(compiler="", python_headers=False), "compiler", "note", "a C++ compiler, Python.h", "python3.11-dev"),
        (laptop(operations="it is not in /x"), "DeepSpeed", "note", "not in /x", "labkit compile"),
        (laptop(operations="it is not in /x", platform="darwin"), "DeepSpeed", "fine", "layouts run on torch", ""),
        (laptop(git=""), "git", "note", "missing", "git"),
        (laptop(bubblewrap=""), "sandbox", "note", "bubblewrap is missing", "apt-get install bubblewrap"),
        (laptop(bubblewrap="", platform="darwin"), "sandbox", "fine", "grade submissions on Linux", ""),
    ],
)
def test_each_wrong_thing_has_a_fact_and_a_next_step(facts, topic, level, in_fact, in_step):
    one = finding(facts, topic)
    assert one.level == level
    assert in_fact in one.fact
    assert in_step in one.next_step
    assert bool(one.next_step) == (level != "fine")
    assert "\n" not in one.fact + one.next_step


@pytest.mark.parametrize(
    ("build", "driver", "driver_cuda", "fits"),
    [
        ("13.0", "580.65.06", "13.0", True),
        ("13.0", "570.86.15", "12.8", False),
        ("12.8", "535.104.05", "12.2", True),
        ("12.8", "580.65.06", "13.0", True),
        ("12.8", "470.57.02", "11.4", False),
        ("13.0", "570.86.15", "", False),
        ("13.0", "580.65.06", "", True),
        ("14.1", "600.1", "", True),
    ],
)
def test_driver_is_held_against_the_cuda_build(build, driver, driver_cuda, fits):
    torch = dataclasses.replace(CUDA_TORCH, cuda_build=build, num_devices=4 if fits else 0)
    facts = server(torch=torch, driver=driver, driver_cuda=driver_cuda)
    one = finding(facts, "driver")
    assert one.level == ("fine" if fits else "wrong")
    if not fits:
        assert driver in one.fact
        assert build in one.fact
        assert one.next_step.startswith("update the driver to ")
        assert finding(facts, "GPUs").next_step == "see driver, below"


def test_fewer_gpus_than_ranks_is_a_note_with_both_numbers():
    facts = server(gpus=(H100,), torch=dataclasses.replace(CUDA_TORCH, num_devices=1))
    one = finding(facts, "GPUs")
    assert one.level == "note"
    assert "4 ranks need 4 for NCCL and 1 can be used" in one.fact
    assert one.next_step == "start at most 1 ranks for NCCL"
    assert finding(facts, "GPUs", num_ranks=1).level == "fine"


def test_report_says_what_blocks_and_what_limits():
    blocked = doctor.report(doctor.judge(laptop(num_free_ports=0, hostname_resolves=False)))
    assert blocked.endswith("The lab will not run before this is put right: ports.")
    limited = doctor.report(doctor.judge(laptop(hostname_resolves=False)))
    assert limited.endswith("The lab runs; this limits it: host name.")
    assert "next: add `127.0.0.1 laptop` to /etc/hosts" in limited


def test_gpu_list_of_the_driver_is_read():
    text = "NVIDIA H200, 143771, 580.65.06\nNVIDIA H200, [N/A], 580.65.06\nrubbish\n"
    gpus, driver = doctor_facts.parse_gpus(text)
    assert [gpu.memory_bytes for gpu in gpus] == [143771 << 20, 0]
    assert driver == "580.65.06"
    assert doctor_facts.parse_gpus("") == ((), "")


@pytest.mark.parametrize(
    ("head", "version"),
    [
        ("| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0     |", "13.0"),
        ("| NVIDIA-SMI 600.1   Driver Version: 600.1   CUDA UMD Version: 13.3 |", "13.3"),
        ("CUDA Version: N/A", ""),
        ("", ""),
    ],
)
def test_cuda_version_of_the_driver_is_read(head, version):
    assert doctor_facts.parse_driver_cuda(head) == version


@pytest.mark.parametrize(
    ("text", "cores"),
    [("150000 100000", 1), ("50000 100000", 1), ("400000 100000", 4), ("max 100000", None), ("", None)],
)
def test_container_quota_is_read(text, cores):
    assert doctor_facts.parse_cpu_quota(text) == cores


def test_facts_of_this_machine_are_gathered():
    facts = doctor_facts.gather()
    assert facts.torch.version, facts.torch.error
    assert facts.torch.gloo
    assert facts.num_cores >= 1
    assert facts.num_free_ports > 0
    assert set(facts.packages) == set(doctor_facts.PACKAGES)


def test_a_broken_torch_is_a_fact_not_a_crash(monkeypatch):
    monkeypatch.setattr(doctor_facts, "_ASK_TORCH", "raise ImportError('libcudart.so.13: cannot open')")
    facts = doctor_facts.gather()
    assert facts.torch == Torch(error="ImportError: libcudart.so.13: cannot open")
    assert finding(facts, "torch").level == "blocks"
