"""core/draws.py: the numbers are SplitMix64's, uniform and independent; and a seed means the same
texts, in parts, by either engine, of two processes as of one, and whatever was sampled before."""

import itertools
import json
import math
import shutil
from collections import Counter
from types import SimpleNamespace

from common import fast
from common.checked import CoTrainer
from common.core import plain
from common.core.draws import row_key, uniform
from common.core.model import tokenize
from common.run.models import load_model
from common.tasks.math import load_questions
from tango import solve_prompt

import pytest
import torch
from conftest import keys, perturb, run_here, same_weights, small

WORDS = {"seed": 0, "step": 7, "player": "generator", "call": 1}


def numbers(rows: int, tokens: int, **words) -> torch.Tensor:
    """(rows, tokens)"""
    its = torch.tensor([row_key(*(WORDS | words).values(), row) for row in range(rows)])
    return torch.stack([uniform(its, place) for place in range(tokens)], 1)


def test_the_numbers_are_those_published_for_splitmix64():
    """Of the seed 1234567, as https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64 has
    them; the upper 53 bits count.
    """
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    published += [4593380528125082431, 16408922859458223821]
    found = [uniform(torch.tensor([1234567]), place).item() for place in range(5)]
    assert found == [((n >> 11) + 1) / 2**53 for n in published]


def test_keys_do_not_depend_on_the_process_and_fill_64_bits():
    assert row_key(0, 7, "generator", 1) == -4510081882403205462  # Python's hash of a text differs
    many = [row_key(0, i) for i in range(4096)]
    for bit in range(64):
        ones = sum(key >> bit & 1 for key in many)
        assert abs(ones - 2048) < 5 * 32, bit  # five standard deviations
    assert row_key(1, 23) != row_key(12, 3)


def test_numbers_are_uniform():
    u = numbers(1024, 256)
    assert 0 < u.min() and u.max() <= 1
    n, bins = u.numel(), 1000
    counts = torch.histc(u.float(), bins, 0, 1)
    chi_square = ((counts - n / bins) ** 2 / (n / bins)).sum().item()
    assert abs(chi_square - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 8}, {"player": "verifier"}, {"call": 2}])
def test_numbers_are_independent(other):
    """Of those of the next token, the next row, and of another seed, step, player or call."""
    z = (numbers(512, 128) - 0.5) * math.sqrt(12)  # mean 0, variance 1
    pairs = [z[:, 1:] * z[:, :-1], z[1:] * z[:-1]]
    pairs.append(z * (numbers(512, 128, **other) - 0.5) * math.sqrt(12))
    for product in pairs:
        assert abs(product.mean().item()) < 5 / math.sqrt(product.numel())


# ------------------------------------------------------------------ texts
@pytest.fixture(scope="module")
def asked():
    model, tokenizer = load_model("tiny", ["a"], 4, False, seed=0)
    perturb(model)
    rows = load_questions("tiny", 6, 1, seed=0)[0]
    prompts = tokenize([solve_prompt(row["question"]) for row in rows for _ in range(4)], tokenizer)
    return model.eval(), prompts, [tokenizer.eos_token_id]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_engines_write_the_same_in_any_parts(asked, temperature):
    model, prompts, ends = asked
    its = keys(len(prompts))
    whole, logps = fast.generate(model, prompts, 24, temperature, ends, its)
    assert len({*map(str, whole)}) > 12
    for engine, size in itertools.product((fast, plain), (5, 24)):
        found = []
        for i in range(0, len(prompts), size):
            part = prompts[i : i + size], 24, temperature, ends, its[i : i + size]
            found += zip(*engine.generate(model, *part))
        assert [ids for ids, _ in found] == whole
        for (_, one), other in zip(found, logps):
            assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("engine", [fast, plain])
def test_tokens_come_as_often_as_they_are_likely(asked, engine):
    model, prompts, _ = asked
    count, T = 2000, 4.0  # hot, so that many tokens are likely enough to be counted
    ids, logps = engine.generate(model, prompts[:1] * count, 1, T, [], keys(count))
    with torch.no_grad():
        p = (model(input_ids=torch.tensor(prompts[:1])).logits[0, -1] / T).softmax(-1)
    found, chi_square, cells, rest = Counter(token for (token,) in ids), 0.0, 0, [0.0, 0]
    for token, expected in enumerate((p * count).tolist()):
        if expected < 5:  # too rare for a cell of its own
            rest = [rest[0] + expected, rest[1] + found[token]]
        else:
            chi_square, cells = chi_square + (found[token] - expected) ** 2 / expected, cells + 1
    chi_square += (rest[1] - rest[0]) ** 2 / max(rest[0], 5)
    assert cells > 3 and chi_square < cells + 5 * math.sqrt(2 * cells)


# ------------------------------------------------------------------ whole runs
def texts_of(folder) -> list[tuple]:
    rows = map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines())
    return [(row["step"], row["player"], *row["tokens"]) for row in rows]


def test_a_seed_means_the_same_texts_with_plain_and_in_other_parts(finished, tmp_path):
    expected, _, _ = finished("tango.py")
    for name, more in {"plain": ["--plain"], "parts": ["--generation-batch-size", 3]}.items():
        run_here("tango.py", *small("tango.py", tmp_path / name, "--eval-every", 0, *more))
        assert texts_of(tmp_path / name) == texts_of(expected), name
    same_weights(tmp_path / "parts", expected)


def test_a_run_that_resumes_with_less_memory_writes_the_same_texts(finished, tmp_path):
    expected, _, _ = finished("tango.py")
    folder = tmp_path / "run"
    shutil.copytree(expected, folder)
    shutil.rmtree(folder / "checkpoint-6")
    shown = run_here("tango.py", *small("tango.py", folder, "--generation-batch-size", 3))
    assert "resumes from checkpoint-4" in shown and texts_of(folder) == texts_of(expected)
    same_weights(folder, expected)


# ------------------------------------------------------------------ keys of a trainer
def trainer_of(process: int, everyones: list[list], evaluating=False):
    """What `row_keys` needs of one of several processes; everyones: the prompts of each."""
    its = SimpleNamespace(args=SimpleNamespace(seed=3), state=SimpleNamespace(global_step=5))
    its.accelerator = SimpleNamespace(process_index=process, num_processes=len(everyones))
    its.sample_calls, its.asked_in_evaluation = 0, Counter() if evaluating else None

    def gather(values):
        counts = [len(prompts) for prompts in everyones]
        if evaluating:
            return [[row_key(3, "p", prompt) for prompt in prompts] for prompts in everyones]
        return [values[0][:1] * n if values[0] else [row_key(3, 5, "p", 1)] * n for n in counts]

    its.gather = gather
    return its


@pytest.mark.parametrize("evaluating", [False, True])
def test_of_several_processes_rows_have_the_keys_that_one_process_gives_them(evaluating):
    prompts = [[1, 2], [1, 2], [3], [1, 2], [4], [4], [3]]
    whole = CoTrainer.row_keys(trainer_of(0, [prompts], evaluating), "p", prompts)
    assert len({*whole}) == len(prompts)  # copies of a prompt draw apart
    for cuts in ((2,), (0,), (3, 5), (7,)):
        parts = [prompts[i:j] for i, j in zip((0, *cuts), (*cuts, len(prompts)))]
        found = []
        for process, part in enumerate(parts):
            found += CoTrainer.row_keys(trainer_of(process, parts, evaluating), "p", part)
        assert found == whole, cuts


def test_a_further_call_and_a_further_step_draw_anew():
    trainer, prompts = trainer_of(0, [[[1]] * 3]), [[1]] * 3
    one, two = (CoTrainer.row_keys(trainer, "p", prompts) for _ in range(2))
    trainer.sample_calls, trainer.state.global_step = 0, 6
    assert len({*one, *two, *CoTrainer.row_keys(trainer, "p", prompts)}) == 9


def test_in_an_evaluation_neither_step_nor_call_counts():
    trainer, prompts = trainer_of(0, [[[1], [2]]], True), [[1], [2]]
    first = CoTrainer.row_keys(trainer, "p", prompts)
    assert CoTrainer.row_keys(trainer, "p", prompts) != first  # asked twice, two samples
    trainer.state.global_step, trainer.asked_in_evaluation = 9, Counter()
    assert CoTrainer.row_keys(trainer, "p", prompts) == first
