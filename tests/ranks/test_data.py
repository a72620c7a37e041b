"""The text to train on and the samples of a step. Starts no rank."""

import pathlib
from dataclasses import replace

import pytest
import torch

from labkit.errors import PlanError
from labkit.rank import data
from labkit.spec import Layout, Model

MODEL = Model(num_layers=1, d_model=32, num_heads=4, vocab_size=256, seq_len=16)


def test_the_default_text_is_the_standard_librarys_source():
    text = data.load(None, MODEL)
    assert text.dtype == torch.uint8
    assert len(text) > 1_000_000
    assert b"def " in bytes(text[:100_000].tolist())
    assert data.load(None, MODEL) is text


def test_a_file_is_read_as_bytes(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)))
    assert data.load(str(file), MODEL).tolist() == list(range(256))


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "c.txt").write_bytes(b"3" * 10)
    (tmp_path / "a.txt").write_bytes(b"1" * 10)
    (tmp_path / "b" / "z.txt").write_bytes(b"2" * 10)
    (tmp_path / ".hidden" / "z.txt").write_bytes(b"4" * 10)
    (tmp_path / ".z").write_bytes(b"5" * 10)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert bytes(data.load(str(tmp_path), MODEL).tolist()) == b"1" * 10 + b"2" * 10 + b"3" * 10


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_bytes(b"x" * 100)
    assert len(data.load("~/mine.txt", MODEL)) == 100


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "names nothing"),
        ("nowhere/at/all", "does not exist"),
        ("~nobody-of-that-name/z", "does not exist"),
        ("x" * 5000, "file name too long"),
        ("a\0b", "null"),
        ("/dev/zero", "device, pipe or socket"),
    ],
)
def test_a_path_that_is_no_text_says_why(path, words):
    with pytest.raises(PlanError, match=words) as raised:
        data.load(path, MODEL)
    assert len(str(raised.value)) < 400


def test_a_path_through_a_file_says_why(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    with pytest.raises(PlanError, match="not a directory"):
        data.load(str(tmp_path / "file" / "z"), MODEL)


def test_a_folder_without_files_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlanError, match="no files in it"):
        data.load(str(tmp_path), MODEL)


def test_too_little_text_is_refused_with_both_numbers(tmp_path):
    file = tmp_path / "short"
    file.write_bytes(b"x" * 16)
    with pytest.raises(PlanError, match=r"16 bytes but a sample takes 17.*Use seq_len=15"):
        data.load(str(file), MODEL)
    file.write_bytes(b"")
    with pytest.raises(PlanError, match=r"0 bytes.*Give a longer text"):
        data.load(str(file), MODEL)
    file.write_bytes(b"x" * 17)
    text = data.load(str(file), MODEL)
    tokens, _ = data.batch(text, MODEL, Layout(microbatch_size=3), seed=0, step=0, dp_rank=0)
    assert tokens.shape == (3, 16)


def test_too_much_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LARGEST_TEXT", 50)
    file = tmp_path / "long"
    file.write_bytes(b"x" * 51)
    with pytest.raises(PlanError, match="at most"):
        data.load(str(file), MODEL)


def test_bytes_beyond_the_vocabulary_are_refused(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"abc" * 100)
    small = replace(MODEL, vocab_size=100)
    assert len(data.load(str(file), small)) == 300
    file.write_bytes(b"xyz" * 100)
    with pytest.raises(PlanError, match="has the byte 122 but vocab_size=100"):
        data.load(str(file), small)


def test_text_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    file = tmp_path / "secret"
    file.write_bytes(b"x" * 100)
    monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)  # root, as whom tests may run, reads everything
    with pytest.raises(PlanError, match="cannot be read: permission denied"):
        data.load(str(file), MODEL)


def test_targets_are_the_tokens_one_further_on(tmp_path):
    text = torch.arange(200, dtype=torch.uint8)
    tokens, targets = data.batch(text, MODEL, Layout(microbatch_size=5), seed=0, step=0, dp_rank=0)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens + 1, targets)


@pytest.mark.parametrize(
    "text", ["b12", "m12", "dp2 m3 b2", "dp4 b3", "dp3 m2 b2", "pp4 m4 b3", "dp2 pp2 m6", "tp2 m3 b4"]
)
def test_samples_depend_on_seed_step_and_global_batch_only(text):
    corpus, layout = data.load(None, MODEL), Layout.parse(text)
    expected, _ = data.batch(corpus, MODEL, Layout(microbatch_size=12), seed=3, step=7, dp_rank=0)
    parts = [data.batch(corpus, MODEL, layout, seed=3, step=7, dp_rank=rank)[0] for rank in range(layout.dp)]
    assert torch.equal(torch.cat(parts), expected)
    for seed, step in ((4, 7), (3, 8)):
        other, _ = data.batch(corpus, MODEL, layout, seed=seed, step=step, dp_rank=0)
        assert not torch.equal(other, parts[0])


def test_the_last_sample_of_a_text_can_be_drawn():
    text = torch.arange(18, dtype=torch.uint8)
    firsts = {
        int(first)
        for step in range(40)
        for first in data.batch(text, MODEL, Layout(microbatch_size=2), seed=0, step=step, dp_rank=0)[0][:, 0]
    }
    assert firsts == {0, 1}
