"""benchmarks/one_gpu.py and rollouts.py, on a CPU with tiny shapes.

Every cell ends with figures; the random model is built as a loaded one is; all ways of sampling
give the same greedy tokens; docs/one-gpu.md holds the tables that are made from the results.
"""

import json
import shutil
import sys
import time

from common.memory import GIB
from common.model import TINY, load_model
from common.sampling import sample
from common.tasks.math import load_questions
from tango import solve_prompt

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from conftest import ROOT, run_script
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(ROOT / "benchmarks"))
import one_gpu  # noqa: E402
import one_gpu_docs  # noqa: E402
import rollouts  # noqa: E402

SMALL = {"vocab_size": 267, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def player():
    """The embedded model with an adapter that does something, prompts of unlike length, each three
    times, and the tokenizer.
    """
    model, tokenizer = load_model("tiny", ["player"], 8, False, seed=0)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02)
    questions = ["3+4 mod 100", "((3+4)*6)-5 mod 100", "9-(2*(7+1)) mod 100"]
    questions += [row["question"] for row in load_questions("tiny", 3, 1, 0)[0]]
    prompts = [solve_prompt(question) for question in questions for _ in range(3)]
    rows = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)
    return model.eval(), rows["input_ids"], tokenizer


@pytest.mark.parametrize("name", ["static", "generate_batch", "sample"])
def test_every_method_gives_the_greedy_tokens_of_generate(player, name):
    model, ids, tokenizer = player
    arguments = (model, ids, 40, 0.0, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    expected = rollouts.generate(*arguments)
    assert len({len(row) for row in expected}) > 2  # rows end at different places
    assert rollouts.METHODS[name](*arguments) == expected


@pytest.mark.parametrize("window, tokens", [(1, 12), (4, 12), (5, 40), (128, 1)])
def test_static_slots_in_windows(player, window, tokens):
    """Windows that do not divide the length, rows that are dropped in between, a single token."""
    model, ids, tokenizer = player
    rest = (tokens, 0.0, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    assert rollouts.sample_static(model, ids, *rest, window=window) == sample(model, ids, *rest)[0]


def test_memory_that_was_never_written_is_never_seen(player, monkeypatch):
    """Slots are reserved, not filled: what was in that memory, a NaN at worst, stays masked."""
    model, ids, tokenizer = player
    rest = (10, 0.0, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    expected = sample(model, ids, *rest)[0]
    original = torch.Tensor.new_empty
    with_nan = lambda self, *a, **k: original(self, *a, **k).fill_(torch.nan)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", with_nan)
    assert rollouts.sample_static(model, ids, *rest) == expected


def test_static_slots_sample_from_the_models_distribution(player):
    model, ids, tokenizer = player
    torch.manual_seed(0)
    rows = rollouts.sample_static(model, [ids[0]] * 4000, 2, 1.5, [], tokenizer.pad_token_id)
    seen = torch.bincount(torch.tensor([row[1] for row in rows]), minlength=267) / 4000
    prefixes = torch.tensor(ids[0])
    with torch.no_grad():
        first = torch.softmax(model(prefixes[None]).logits[0, -1].float() / 1.5, -1)
        both = torch.cat([prefixes.expand(267, -1), torch.arange(267)[:, None]], 1)
        second = torch.softmax(model(both).logits[:, -1].float() / 1.5, -1)
        expected = first @ second  # (V,), summed over the first token
    assert (seen - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_sampling_leaves_the_adapters_as_they_were(player):
    model, ids, tokenizer = player
    before = {n: (p.dtype, p.data_ptr()) for n, p in model.named_parameters()}
    with rollouts.adapters_in(model, torch.bfloat16):
        assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.bfloat16}
    rollouts.sample_static(model, ids[:2], 3, 1.0, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    assert before == {n: (p.dtype, p.data_ptr()) for n, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_the_random_model_is_built_as_a_loaded_one(tmp_path, tied):
    config = Qwen2Config(**SMALL, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for path in TINY.glob("*token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    loaded = load_model(str(tmp_path), ["player"], 4, True, seed=0)[0]
    made = one_gpu.add_players(one_gpu.random_model(config, "cpu"), ["player"], 4, 0)

    def describe(model):
        return {
            name: (type(p).__name__, p.shape, p.dtype, p.requires_grad and "lora_" in name)
            for name, p in model.named_parameters()
        }

    assert describe(made) == describe(loaded)
    for attribute in ("is_loaded_in_4bit", "is_quantized", "quantization_method"):
        assert getattr(made, attribute) == getattr(loaded, attribute)
    ids = torch.randint(5, 267, (2, 9))
    logits = made(input_ids=ids).logits
    assert torch.isfinite(logits).all() and logits.std() > 0.01
    rotary = [m.get_base_model().model.rotary_emb.inv_freq for m in (made, loaded)]
    assert torch.equal(*rotary)


def test_flops_are_those_that_are_done():
    """By torch's own counter, which counts attention in full and not its causal half."""
    config = Qwen2Config(**SMALL)
    model = one_gpu.random_model(config, "cpu", four_bit=False)
    model.set_attn_implementation("eager")  # of which the counter sees every product
    model.enable_input_require_grads()
    rows, prompt, completion = 3, 20, 12
    length = prompt + completion
    with FlopCounterMode(display=False) as counter:
        ids = torch.randint(5, 267, (rows, length))
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        states.backward(torch.ones_like(states))
    head = rows * 4 * config.vocab_size * config.hidden_size * completion
    attention = rows * config.num_hidden_layers * 2 * length**2 * config.hidden_size * 3
    flops, again = (
        one_gpu.training_flops(config, rows, prompt, completion, checkpointing) - head
        for checkpointing in (False, True)
    )
    assert counter.get_total_flops() == pytest.approx(flops + attention, rel=0.01)
    assert again > 1.4 * flops


def test_phases_are_exclusive_and_complete():
    phases = one_gpu.Phases()
    start = time.perf_counter()
    phases.reset()
    time.sleep(0.02)
    with phases("outer"):
        time.sleep(0.03)
        with phases("inner"):
            time.sleep(0.05)
        time.sleep(0.01)
    phases.close()
    assert sum(phases.seconds.values()) == pytest.approx(time.perf_counter() - start, abs=5e-3)
    for name, least in (("other", 0.02), ("outer", 0.04), ("inner", 0.05)):
        assert least <= phases.seconds[name] < least + 0.2


def test_a_cell_that_fails_leaves_its_error_and_no_time_is_said(tmp_path, capsys):
    def fail():
        raise RuntimeError("no kernel\nfor this card")

    cells = one_gpu.Cells(tmp_path, minutes=1)
    cells("one", "kind", fail, size="7b")
    assert json.loads((tmp_path / "one.json").read_text())["error"] == "RuntimeError: no kernel"
    cells.took["kind"] = 100.0
    cells("two", "kind", fail)
    row = json.loads((tmp_path / "two.json").read_text())
    assert row["skipped"] == "no time was left" and "error" not in row
    assert "no kernel" in capsys.readouterr().out


@pytest.fixture
def small_data(tmp_path, monkeypatch):
    """A folder for --data with the embedded tokenizer in place of Qwen's, for which --shapes tiny
    would compute logits of 152,000 tokens. Here they have 16,384 ids, most of which mean nothing,
    so that hardly any text ends early.
    """
    shutil.copytree(TINY, tmp_path / "qwen2.5-tokenizer", ignore=shutil.ignore_patterns("model*"))
    rows = [{"question": f"{i}+{i}", "answer": f"#### {2 * i}"} for i in range(100)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "gsm8k_train.jsonl").write_text(text)
    monkeypatch.setitem(one_gpu.SHAPES, "tiny", one_gpu.shape(64, 128, 2, 4, 2, vocab=16_384))
    full_batch = one_gpu.full_batch

    def within_vocabulary(*args):
        batch = full_batch(*args)
        return batch | {key: ids % 16_384 for key, ids in batch.items() if key.endswith("_ids")}

    monkeypatch.setattr(one_gpu, "full_batch", within_vocabulary)
    return tmp_path


def test_every_cell_of_the_tiny_shapes_has_figures(small_data, tmp_path, monkeypatch):
    """Both programs as they are run on a GPU, and the tables that are made of their results."""
    out = tmp_path / "out"
    for program, *options in ((one_gpu, "--scripts", "tango", "--repeats", "1"), (rollouts,)):
        arguments = ["--data", small_data, "--out", out, "--shapes", "tiny", *options]
        monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, arguments)])
        program.main()
    results = one_gpu_docs.read_results(out)
    without = {k: cell for k, cell in results.items() if cell.keys() & {"error", "skipped"}}
    assert without == {}
    kinds = {f"training-tiny-{cell}" for cell in ("1-ours", "1-trl", "2-ours", "2-trl")}
    kinds |= {f"step-tango-tiny-0-{who}" for who in ("ours", "two-trainers")}
    kinds |= {f"rollouts-tiny-8x12-{name}" for name in rollouts.METHODS}
    assert {"matmul"} | kinds == results.keys()
    ours, theirs = (results[f"step-tango-tiny-0-{who}"] for who in ("ours", "two-trainers"))
    for cell in (ours, theirs):
        assert cell["steps"] == 2
        assert {"rollout", "log-prob", "backward", "scoring"} <= cell["phases"].keys()
        assert sum(cell["phases"].values()) == pytest.approx(cell["seconds"], rel=0.05)
    # the same work: all solutions and their judgements; one solution per question, its judgements
    for cell in (ours, theirs):
        assert [record["tokens"] for record in cell["records"]] == [64, 48]
    for name in rollouts.METHODS:
        assert results[f"rollouts-tiny-8x12-{name}"]["sampled"] == 8 * 12
    text = one_gpu_docs.with_tables(one_gpu_docs.DOCS.read_text(), results)
    assert f"{ours['seconds']:.2f}" in text and "`static`" in text


def test_the_document_holds_the_tables_that_are_made():
    """By benchmarks/one_gpu_docs.py, from common/memory.py and docs/evidence/one_gpu/."""
    text = one_gpu_docs.DOCS.read_text()
    assert text == one_gpu_docs.with_tables(text, one_gpu_docs.read_results())


@pytest.mark.parametrize("size, micro_batch, limit", [("7b", 4, 22), ("1.5b", 4, 10)])
def test_two_players_are_estimated_to_fit_24_gb(size, micro_batch, limit):
    """The targets: two players of 7B within 22 GiB, two of 1.5B within 10."""
    need = one_gpu_docs.need(size, rows=64, micro_batch=micro_batch)
    assert need["peak"] / GIB < limit


# ------------------------------------------------------------------ several processes
def test_the_configurations_are_understood_by_accelerate():
    files = sorted((ROOT / "docs" / "accelerate").glob("*.yaml"))
    assert len(files) == 2
    for path in files:
        config = load_config_from_file(str(path))
        assert str(config.distributed_type).endswith("MULTI_GPU")
        assert config.mixed_precision == "bf16" and not config.use_cpu


TWO_PROCESSES = """
import os, socket, sys
sys.path.insert(0, {root!r})
import tango, tyro
from accelerate.utils import gather_object
from torch.multiprocessing import start_processes

def process(rank):
    os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}}
    trainers, train = [], tango.Tango.train
    tango.Tango.train = lambda trainer, **how: trainers.append(trainer) or train(trainer, **how)
    tango.evaluate = lambda *_: {{}}  # not what this is about
    with tango.plain_errors():
        tango.main(tyro.cli(tango.Args))
        weights = trainers[0].model.named_parameters()
        B = {{n: p.double().abs().sum().item() for n, p in weights if "lora_B" in n}}
        first, second = gather_object([B])
        assert first == second, "the processes' adapters differ"
        for player in ("generator", "verifier"):
            assert any(value > 0 for name, value in B.items() if player in name), player
        if rank == 0:
            print("alike on", trainers[0].accelerator.num_processes)

with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
os.environ |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}}
start_processes(process, nprocs=2, start_method="fork")
"""


def test_a_four_bit_base_on_two_processes(tmp_path):
    """DDP around frozen 4-bit weights and two adapters: both are trained, and alike on both
    processes, which see different rows. Forked from one, they import everything only once.
    """
    (tmp_path / "two.py").write_text(TWO_PROCESSES.format(root=str(ROOT)))
    arguments = "--steps 2 --ver-warmup 1 --questions 2 --group-size 4 --micro-batch 4"
    arguments += " --eval-questions 4 --lora-rank 4 --four-bit --out"
    result = run_script(tmp_path / "two.py", *arguments.split(), tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "alike on 2" in result.stdout
