"""lab/speed/gpu.py on a CPU with tiny shapes: every kind of cell ends with figures; two players are
estimated to fit their cards. test_pages.py tests that the pages hold the tables.
"""

import shutil
from pathlib import Path

from common.run.memory import GIB
from common.tiny import TINY
from lab.speed import gpu, gpu_tables

import pytest
from conftest import write_rows


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The small model's tokenizer in place of Qwen's, for which the head alone would take minutes.
    There are 16,384 ids, most of which mean nothing, so that hardly any text ends early.
    """
    shutil.copytree(TINY, tmp_path / "qwen2.5-tokenizer", ignore=shutil.ignore_patterns("model*"))
    rows = [{"question": f"{i}+{i}", "answer": f"#### {2 * i}"} for i in range(100)]
    write_rows(tmp_path / "gsm8k_train.jsonl", rows)
    monkeypatch.setitem(gpu.SHAPES, "tiny", gpu.shape(64, 128, 2, 4, 2, vocab=16_384))
    return gpu.Bench(tmp_path, tmp_path / "models", tiny=True)


def test_every_kind_of_cell_has_figures(bench, tmp_path, capsys):
    out = tmp_path / "gpu.jsonl"
    cells = ["logprob/32", "rollouts/tiny/8x6", "unlike/tiny/2", "alike/tiny/2", "two/tiny"]
    cells += ["peak/tiny/4x2", "resume/tiny"]
    assert {cell.split("/")[0] for cell in cells} == gpu.CELLS.keys()
    gpu.measure(cells, bench, out)
    rows = gpu.read(out)
    assert [row for row in rows.values() if "error" in row] == [] and [*rows] == cells
    peers = {row["against"] for row in rows["logprob/32"]["peers"]}
    assert peers >= {"TRL's fused head", "plain autograd"}
    for name in ("generate", "sample"):
        cell = rows["rollouts/tiny/8x6"][name]
        assert cell["ms_per_token_step"] * 6 == pytest.approx(1000 * cell["seconds"])
    ours, theirs = rows["two/tiny"]["ours"], rows["two/tiny"]["two trainers"]
    assert len(ours["seconds"]) == 4 and len(theirs["seconds"]) == 2
    # solutions and their judgements; a solution per question and its judgements
    assert ours["tokens"] == [2 * 2 * 8 * 8, (2 + 16) * 8] * 2
    assert rows["resume/tiny"]["largest_difference"] == 0.0
    (_, compared), (_, others) = gpu_tables.measured_table(rows), gpu_tables.other_table(rows)
    assert {name.strip("`") for name, *_ in compared + others} == {*cells}
    assert "largest_difference 0" in dict(others)["`resume/tiny`"]
    assert gpu_tables.used(rows["alike/tiny/2"]["TRL, checkpointing off"]) in sum(compared, [])


def test_an_error_is_one_line_of_the_table(bench, tmp_path, monkeypatch):
    def fails(_):
        raise RuntimeError("tango.py: Traceback\n  File ...\n\nno memory is left")

    monkeypatch.setitem(gpu.CELLS, "peak", fails)
    gpu.measure(["peak"], bench, tmp_path / "gpu.jsonl")
    _, ((_, text),) = gpu_tables.other_table(gpu.read(tmp_path / "gpu.jsonl"))
    assert text == "RuntimeError: tango.py: Traceback File ... no memory is left"


def test_a_model_that_was_cut_short_is_made_again(bench, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(bench, "tokenizer", None)  # weights and config are there by then
        with pytest.raises(AttributeError):
            bench.model("tiny")
    assert Path(bench.model("tiny"), "tokenizer.json").exists()


def test_the_cells_of_the_page_are_measured_without_names():
    assert [*gpu.read(gpu.OUT)] == gpu.SHOWN


@pytest.mark.parametrize("size, micro_batch, limit", [("7b", 4, 22), ("1.5b", 4, 10)])
def test_two_players_are_estimated_to_fit_24_gb(size, micro_batch, limit):
    """The targets: two players of 7B within 22 GiB, two of 1.5B within 10."""
    need = gpu_tables.need(size, rows=64, micro_batch=micro_batch)
    assert need["peak"] / GIB < limit


def test_what_fits_a_card_fits_the_memory_that_it_has():
    """As torch reports it for an RTX 4080, an RTX 4090 and an A100: less than they are named by."""
    for card, found in {"16 GB": 15.69, "24 GB": 23.64, "80 GB": 79.25}.items():
        fits = [gpu_tables.fitting(size, gpu_tables.CARDS[card]) for size in gpu.SHAPES]
        peak = max(fit[2]["peak"] for fit in fits if fit)
        assert peak + gpu_tables.CUDA_CONTEXT <= found * GIB
