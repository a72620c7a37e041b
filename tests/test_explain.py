"""`labkit explain`: files recognised, explained for a shell and as JSON."""

import csv
import json
import subprocess
import sys

import pytest

import labkit as lk
from labkit import cli
from labkit.errors import PlanError

LOG = """\
[2025-01-01 10:00:00,000] [INFO] [utils.py:781:see_memory_usage] Stage 3 initialize beginning
[2025-01-01 10:00:00,001] [INFO] [utils.py:782:see_memory_usage] MA 1.86 GB         Max_MA 1.86 GB         CA 1.9 GB
[2025-01-01 10:00:00,002] [INFO] [utils.py:789:see_memory_usage] CPU Virtual Memory:  used = 10.0 GB, percent = 1.0%
[2025-01-01 10:00:01,000] [INFO] [utils.py:781:see_memory_usage] After initializing ZeRO optimizer
[2025-01-01 10:00:01,001] [INFO] [utils.py:782:see_memory_usage] MA 0.5 GB         Max_MA 1.9 GB         CA 1.9 GB
***** Running training *****
  Instantaneous batch size per device = 2
  Total train batch size (w. parallel, distributed & accumulation) = 48
  Gradient Accumulation steps = 3
  Number of trainable parameters = 1,000,000,000
"""


@pytest.fixture
def written(tmp_path):
    def write(content, name="file.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def run(capsys, *arguments):
    code = cli.main(["explain", *(str(one) for one in arguments)])
    return code, *capsys.readouterr()


def test_mistakes_come_first_and_exit_with_1(written, capsys):
    path = written({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}})
    code, out, err = run(capsys, path, "--world-size", 7)
    lines = out.splitlines()
    assert (code, err) == (1, "")
    assert lines[0] == "DeepSpeed configuration: 1 mistake, 1 note"
    assert lines[3] == "mistake  train_batch_size"
    assert "256 != 2 * 18 * 7 = 252" in out
    assert "Fields; in parentheses what is in force without standing in the file:" in out
    assert "samples that one rank computes at a time (default computed)" in out
    assert "  bf16\n" in out
    assert max(len(line) for line in lines[: lines.index("")]) <= 100


def test_a_right_file_exits_with_0(written, capsys):
    path = written({"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}})
    code, out, _ = run(capsys, path, "--world-size", 8, "--model", "tiny")
    assert code == 0
    assert "Layout: dp8 zero1." in out


def test_json_has_everything(written, capsys):
    path = written({"train_batch_size": 7, "fp16": True})
    code, out, _ = run(capsys, path, "--json", "--world-size", 2)
    said = json.loads(out)
    assert (code, said["kind"], said["file"]) == (1, "DeepSpeed configuration", str(path))
    first = said["findings"][0]
    assert set(first) == {"severity", "path", "fact", "rule", "fix", "source", "message"}
    assert {one["path"] for one in said["fields"]} >= {"train_batch_size", "fp16"}
    assert said["layout"] is None
    assert said["why_no_plan"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "looks like an empty file"),
        ("host:1:2 [0] NCCL INFO Bootstrap", "looks like an NCCL log"),
        ('{"traceEvents": []}', "looks like a Chrome trace"),
        ('{"model_type": "llama"}', "looks like a model's configuration"),
        ("compute_environment: LOCAL_MACHINE\n", "looks like an Accelerate configuration"),
        ("import torch\n", "looks like Python code"),
        ("hello", "looks like text"),
        ('{"zero_optimization": {', "this DeepSpeed configuration cannot be read: line 1"),
    ],
)
def test_what_it_cannot_read_exits_with_2(written, capsys, content, says):
    code, out, err = run(capsys, written(content))
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("labkit: ")
    assert err.count("\n") == 1


def test_no_file_no_preset_no_text(tmp_path, capsys):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x7fELF\0\0")
    for path, says in ((tmp_path / "none", "cannot be read"), (tmp_path, "cannot be read"), (binary, "binary file")):
        code, _, err = run(capsys, path)
        assert (code, says in err) == (2, True)
    good = tmp_path / "good.json"
    good.write_text('{"train_batch_size": 8}')
    assert run(capsys, good, "--model", "llama9")[0] == 2
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain", str(good), "--world-size", "0"])
    assert ended.value.code == 2


def test_nothing_heavy_is_loaded(repository):
    code = (
        "import sys, labkit.configuration, labkit.explain, labkit.export\n"
        "print([one for one in ('torch', 'deepspeed', 'numpy', 'plotly', 'pydantic') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_explain_is_a_function_too(written):
    verdict = lk.explain.explain(written({"train_batch_size": 8}), world_size=8)
    assert (verdict.kind, verdict.num_mistakes) == ("DeepSpeed configuration", 0)
    assert verdict._repr_html_().startswith("<pre>DeepSpeed configuration: ")
    with pytest.raises(PlanError, match="looks like text"):
        lk.explain.explain(written("hello"))


def test_a_log_is_explained(written):
    verdict = lk.explain.explain(written(LOG, "train.log"))
    assert verdict.kind == "DeepSpeed log"
    assert verdict.summary == "ZeRO stage 3, 1,000,000,000 trainable parameters, 2 reports of memory."
    said = {one.severity: one.fact for one in verdict.findings}
    assert said["note"] == "48 = 2 * 3 * 8"
    assert "1.86 GiB = 1.00 B parameters * 2 bytes = 1.86 GiB: the whole 16-bit model" in said["risk"]


def test_a_log_of_other_ranks(written):
    verdict = lk.explain.explain(written(LOG, "train.log"), world_size=4)
    assert any("belongs to 8 data-parallel ranks, not 4" in one.rule for one in verdict.findings)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism", "zero_optimization.stage"),
        ("Check batch related parameters. ... world_size 16 != 2 * 1 * 1", "train_batch_size"),
        ("Exception: Current loss scale already at minimum - cannot decrease scale anymore.", "fp16.enabled"),
        ("ds_fused\n  Extra inputs are not permitted [type=extra_forbidden]", "ds_fused"),
        ("AssertionError: zero stage 2 requires an optimizer", "optimizer"),
    ],
)
def test_errors_in_a_log_are_mistakes(written, capsys, line, path):
    code, out, _ = run(capsys, written(f"Traceback:\n{line}\n", "err.log"))
    assert code == 1
    assert f"mistake  {path}" in out


CASES = {
    # right answers of the real cases: (severity, path, words)
    "deepspeed-02": [
        ("mistake", "zero_optimization.stage", "Use stage 1 (or 0)"),
        ("risk", "zero_optimization.cpu_offload", "old spelling of offload_optimizer"),
    ],
    "deepspeed-04": [
        ("mistake", "train_batch_size", "256 != 2 * 18 * 7 = 252"),
        ("mistake", "train_batch_size", "266"),
    ],
    "deepspeed-05": [("mistake", "zero_optimization.stage3_prefetch_bucket_size", "=15099494,")],
    "deepspeed-08": [("note", "zero_optimization.offload_optimizer", "it is allowed")],
    "deepspeed-10": [("mistake", "fp16.enabled", "bf16.enabled=true"), ("mistake", "fp16.enabled", "min_loss_scale")],
    "deepspeed-11": [
        ("note", "train_batch_size", "4 GPUs"),
        ("risk", "gradient_accumulation_steps", "plugin says 1 and the DeepSpeed file 4"),
        ("note", "zero_optimization", "parameters and optimizer state on the CPU"),
        ("note", "zero_optimization", "from 52.66 to 172.96"),
        ("risk", "zero_optimization.stage", "zero.Init"),
    ],
}


@pytest.fixture(scope="module")
def real_cases(repository):
    folder = repository.parent / "shared" / "cases"
    if not (folder / "cases.csv").is_file():
        pytest.skip("no folder of real cases beside the checkout")
    with (folder / "cases.csv").open(newline="") as file:
        return {row["id"]: folder / row["file"] for row in csv.DictReader(file) if row["kind"] == "deepspeed"}


def test_real_cases_are_answered_right(real_cases):
    for name, wanted in CASES.items():
        if name not in real_cases:
            continue
        verdict = lk.explain.explain(real_cases[name])
        mistaken = {path for severity, path, _ in wanted if severity == "mistake"}
        assert {one.path for one in verdict.findings if one.severity == "mistake"} == mistaken, name
        for severity, path, words in wanted:
            messages = [one.message for one in verdict.findings if (one.severity, one.path) == (severity, path)]
            assert any(words in one for one in messages), (name, words, messages)


def test_every_real_case_is_read(real_cases):
    for path in real_cases.values():
        assert lk.explain.explain(path).findings
