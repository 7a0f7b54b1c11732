"""common/memory.py: what is said to be exact is counted in real tensors, what is estimated is measured with a profiler."""

import importlib
import importlib.util
import re
import types

from common.data import UserError
from common.memory import GIB, available, check_memory, estimate, machine_options, read_config, shapes, table
from common.model import TINY, load_model
from common.run import Run

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, Qwen2Config, TrainerCallback
from trl import GRPOConfig

# shapes as published in the models' config.json
QWEN = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2),
    "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4),
}
SMALL = dict(
    vocab_size=512, hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32,
)  # fmt: skip
RUN = dict(adapters=2, lora_rank=16, four_bit=True, rows=64, micro_batch=4)
TURNS = [(512, 1024), (1536, 1024)]
SAID = [(0, 1024), (1024, 1024)]  # the same, as a script says it: without instructions and question


def qwen(size: str) -> Qwen2Config:
    tied = size != "7B"
    return Qwen2Config(**QWEN[size], tie_word_embeddings=tied, vocab_size=151936 if tied else 152064)


# ------------------------------------------------------------------ exact parts
@pytest.mark.parametrize("size, published", [("0.5B", 0.494e9), ("1.5B", 1.54e9), ("7B", 7.62e9)])
def test_parameters_are_those_published(size, published):
    linear, other, q_norm = shapes(qwen(size))
    assert sum(i * o for i, o in linear) + other == pytest.approx(published, rel=5e-3)
    assert len(linear) == 7 * qwen(size).num_hidden_layers and not q_norm


def stored(tensors) -> int:
    """Bytes of all storages behind these tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_adapters_are_what_load_model_makes(tmp_path, four_bit, tied):
    shape = {**SMALL, "vocab_size": 157, "intermediate_size": 328}  # 128 * 328 entries: a last block that is not full
    AutoModelForCausalLM.from_config(Qwen2Config(**shape, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (TINY / name).exists():
            (tmp_path / name).write_bytes((TINY / name).read_bytes())
    model, _ = load_model(str(tmp_path), ["one", "two", "three"], 4, four_bit, seed=0)
    of_lora = [p for name, p in model.named_parameters() if "lora_" in name]
    tensors = [p for name, p in model.named_parameters() if "lora_" not in name]
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            state = layer.weight.quant_state
            tensors += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    need = estimate(
        read_config(str(tmp_path)), TURNS, adapters=2, frozen_adapters=1, lora_rank=4, four_bit=four_bit, rows=1,
        micro_batch=1, entry=4,
    )  # fmt: skip
    assert need["weights"] == stored(tensors)
    assert need["adapters"] == stored(of_lora) == 3 * need["gradients"]


@pytest.mark.parametrize("eight_bit", [False, True])
def test_adams_state_is_what_the_optimiser_holds(eight_bit):
    linear, _, _ = shapes(Qwen2Config(**SMALL))
    rank = 16
    weights = [torch.nn.Parameter(torch.zeros(n)) for i, o in linear for n in (rank * i, rank * o)]
    assert {p.numel() >= 4096 for p in weights} == {True, False}  # small ones stay in 32 bits
    optimizer = bnb.optim.AdamW(weights, optim_bits=8, is_paged=True) if eight_bit else torch.optim.AdamW(weights)
    for p in weights:
        p.grad = torch.ones_like(p)
    optimizer.step()
    names = ("state1", "state2", "absmax1", "absmax2") if eight_bit else ("exp_avg", "exp_avg_sq")
    held = [state[name] for state in optimizer.state.values() for name in names if name in state]
    need = estimate(Qwen2Config(**SMALL), TURNS, **{**RUN, "adapters": 3, "lora_rank": rank}, eight_bit_adam=eight_bit)
    assert need["adam"] == 3 * stored(held)


def test_each_of_several_processes_has_buckets_for_all_adapters():
    one, two = (estimate(Qwen2Config(**SMALL), TURNS, **{**RUN, "adapters": 3}, processes=n) for n in (1, 2))
    assert two["gradients"] - one["gradients"] == one["adapters"] and one["adapters"] == 3 * one["gradients"]


def test_the_eight_bit_optimiser_trains_one_adapter_and_leaves_the_other_alone(trainer):
    """optim="paged_adamw_8bit", through the trainer: a verifier step, then generator steps."""
    trainer.args.optim = "paged_adamw_8bit"
    at = [{n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_" in n}]
    trainer.add_callback(Snapshots(trainer.model, at))
    trainer.args.max_steps = 2
    trainer.train()

    def moved(step, player):
        return max((at[step + 1][n] - at[step][n]).abs().max() for n in at[0] if f".{player}." in n)

    assert moved(0, "verifier") > 0 and moved(0, "generator") == 0
    assert moved(1, "generator") > 0 and moved(1, "verifier") == 0
    optimizer = trainer.optimizer.optimizer  # accelerate wraps it
    assert isinstance(optimizer, bnb.optim.AdamW) and optimizer.is_paged and optimizer.args.optim_bits == 8
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0]


class Snapshots(TrainerCallback):
    def __init__(self, model, at):
        self.model, self.at = model, at

    def on_step_end(self, *_, **__):
        self.at.append({n: p.detach().clone() for n, p in self.model.named_parameters() if "lora_" in n})


def test_kv_cache_is_that_of_a_dynamic_cache():
    config = Qwen2Config(**SMALL)
    model, cache = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.ones(5, 30, dtype=torch.long), past_key_values=cache)
    held = stored([t for layer in cache.layers for t in (layer.keys, layer.values)])
    need = estimate(config, [(10, 20), (12, 3)], **{**RUN, "rows": 5})
    assert need["kv_cache"] == held


# ------------------------------------------------------------------ estimated parts
def peak(function) -> int:
    """Bytes that `function` has allocated at its highest point, as torch's CPU allocator reports them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = highest = 0
    for _, size in sorted(events):
        now += size
        highest = max(highest, now)
    return highest


def bf16_model(kind: str, rank: int):
    config = AutoConfig.for_model(kind, **SMALL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"), adapter_name="player")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return config, model


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_activations_of_training(kind, checkpointing):
    config, model = bf16_model(kind, 8)
    base = model.get_base_model()
    if checkpointing:
        base.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    rows, prompt, completion = 2, 32, 96
    ids, mask = torch.ones(rows, prompt + completion, dtype=torch.long), torch.ones(rows, prompt + completion).long()
    mask[0, :5] = 0  # padding: attention is given a mask

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            states = base.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        states.backward(torch.ones_like(states))

    step()  # gradients exist from here on
    need = estimate(
        config, [(prompt, completion)], adapters=1, lora_rank=8, four_bit=False, rows=rows, micro_batch=rows,
        checkpointing=checkpointing,
    )  # fmt: skip
    assert need["kept"] + need["layer"] == pytest.approx(peak(step), rel=0.1)


def test_peak_of_sampling():
    config, model = bf16_model("qwen2", 8)
    rows, prompt, completion = 16, 128, 16
    ids, mask = torch.ones(rows, prompt, dtype=torch.long), torch.ones(rows, prompt).long()
    mask[0, :5] = 0
    settings = GenerationConfig(
        max_new_tokens=completion, min_new_tokens=completion, do_sample=True, top_k=0, pad_token_id=0, prefill_chunk_size=64
    )
    measured = peak(lambda: model.generate(input_ids=ids, attention_mask=mask, generation_config=settings))
    need = estimate(
        config, [(prompt, completion)], adapters=1, lora_rank=8, four_bit=False, rows=rows, micro_batch=1, checkpointing=True
    )
    assert need["kv_cache"] < measured  # a lower bound that is exact
    assert need["sampling"] - need["certain"] == pytest.approx(measured, rel=0.25)


# ------------------------------------------------------------------ behaviour
def test_more_of_anything_never_needs_less():
    small = estimate(qwen("1.5B"), [(512, 512)], **RUN)
    for change in (
        {"adapters": 3}, {"frozen_adapters": 1}, {"lora_rank": 32}, {"four_bit": False}, {"rows": 65}, {"micro_batch": 5},
        {"checkpointing": False}, {"entry": 4}, {"vllm_share": 0.9}, {"gpu_bytes": 80 * GIB},
    ):  # fmt: skip
        more = estimate(qwen("1.5B"), [(512, 512)], **{**RUN, **change})
        assert more["peak"] >= small["peak"] and more != small, change
        key = next(iter(change))
        if key not in ("gpu_bytes", "vllm_share"):
            assert more["sampling"] > small["sampling"] or more["training"] > small["training"], change
    for turns in ([(513, 512)], [(512, 513)], [(512, 512), (600, 512)]):
        more = estimate(qwen("1.5B"), turns, **RUN)
        assert more["sampling"] > small["sampling"] and more["training"] > small["training"]
    assert (
        estimate(qwen("1.5B"), TURNS, **RUN, eight_bit_adam=True)["adam"] < 0.3 * estimate(qwen("1.5B"), TURNS, **RUN)["adam"]
    )
    assert estimate(qwen("7B"), [(512, 512)], **RUN)["peak"] > small["peak"]


def arguments(model, **change):
    values = dict(
        model=str(model), four_bit=True, lora_rank=16, micro_batch=32, rows_at_once=256, eight_bit_adam=False, vllm=False,
        dry_run=True,
    )  # fmt: skip
    return types.SimpleNamespace(**{**values, **change})


@pytest.fixture
def card(monkeypatch):
    """A GPU with so many GiB free, as far as this file asks for one."""

    def put_in(gib: float):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Imaginary 24")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(gib * GIB), int(gib * GIB)))

    return put_in


@pytest.fixture
def folder(tmp_path):
    """A folder with nothing but a config: an estimate needs no weights, no tokenizer and no network."""
    qwen("7B").save_pretrained(tmp_path)
    return tmp_path


def test_dry_run_prints_and_ends(folder, card, capsys):
    card(100)
    with pytest.raises(SystemExit) as end:
        check_memory(arguments(folder), SAID, adapters=2)
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "Imaginary 24" in printed and "KV cache" in printed
    weights = float(re.search(r"weights of the base +([\d.]+) GiB", printed)[1])
    assert weights == pytest.approx(estimate(qwen("7B"), TURNS, **RUN)["weights"] / GIB, abs=0.01)


def test_a_run_that_fits_says_nothing(folder, card, capsys):
    card(100)
    assert check_memory(arguments(folder, dry_run=False), SAID, adapters=2) is None
    assert capsys.readouterr().out == ""


def test_what_is_advised_fits_and_twice_that_does_not(folder, card):
    card(23)
    with pytest.raises(
        UserError, match=r"are needed, and there are 23\.0 GiB\. --rows-at-once \d+ and --micro-batch \d+ would fit"
    ) as no:
        check_memory(arguments(folder), SAID, adapters=2)
    rows, micro = (int(re.search(rf"--{name} (\d+)", str(no.value))[1]) for name in ("rows-at-once", "micro-batch"))
    with pytest.raises(SystemExit):
        check_memory(arguments(folder, rows_at_once=rows, micro_batch=micro), SAID, adapters=2)
    for change in ({"rows_at_once": 2 * rows, "micro_batch": micro}, {"rows_at_once": rows, "micro_batch": 2 * micro}):
        with pytest.raises(UserError):
            check_memory(arguments(folder, **change), SAID, adapters=2)
    assert 32 % micro == 0


def test_only_what_is_certain_is_refused_without_dry_run(folder, card, capsys):
    card(23)
    check_memory(arguments(folder, dry_run=False), SAID, adapters=2)  # activations are estimated: a warning
    assert "warning" in capsys.readouterr().out
    card(5)
    with pytest.raises(UserError, match="Not even one row"):
        check_memory(arguments(folder, dry_run=False), SAID, adapters=2)


def test_without_four_bit_it_is_what_is_advised(folder, card):
    card(12)
    with pytest.raises(UserError, match="take --four-bit, a smaller model or shorter completions"):
        check_memory(arguments(folder, four_bit=False), SAID, adapters=2)


def test_pairs_take_twice_the_rows(folder, card):
    card(23)
    settings = dict(rows_at_once=16, micro_batch=8)
    with pytest.raises(SystemExit):
        check_memory(arguments(folder, **settings), SAID, adapters=1)
    with pytest.raises(UserError, match=r" --micro-batch 4 would fit"):
        check_memory(arguments(folder, **settings), SAID, adapters=1, rows_per_item=2)


@pytest.mark.parametrize("installed", [True, False])
def test_vllm_needs_a_gpu_itself_and_a_base_in_16_bits(folder, card, monkeypatch, installed):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None if name == "vllm" else real(name))
    with pytest.raises(UserError, match="--vllm needs an NVIDIA GPU, and vLLM"):
        check_memory(arguments("tiny", vllm=True, four_bit=False), SAID, adapters=2)
    card(100)
    with pytest.raises(UserError, match="Add --no-four-bit" if installed else "pip install"):
        check_memory(arguments(folder, vllm=True), SAID, adapters=2)
    if installed:
        with pytest.raises(SystemExit):
            check_memory(arguments(folder, vllm=True, four_bit=False, micro_batch=4), SAID, adapters=2)


def test_machine_options_are_understood_by_trl(tmp_path):
    for eight_bit, name in ((False, "adamw_torch_fused"), (True, "paged_adamw_8bit")):
        options = machine_options(arguments("tiny", eight_bit_adam=eight_bit))
        config = GRPOConfig(output_dir=str(tmp_path), **options)
        assert config.optim == name and not config.use_vllm
        assert config.gradient_checkpointing == config.bf16 == torch.cuda.is_available()


def test_a_model_that_is_not_there(tmp_path, card):
    with pytest.raises(UserError, match="--model .*nowhere: not 'tiny', and neither a local folder nor the hub"):
        check_memory(arguments(tmp_path / "nowhere"), SAID, adapters=2)


def test_the_embedded_model_on_this_machine(capsys):
    with pytest.raises(SystemExit) as end:
        check_memory(arguments("tiny", four_bit=False), [(64, 64)], adapters=2)
    assert end.value.code == 0 and "memory of this machine" in capsys.readouterr().out
    assert GIB / 4 < available()[0] < 10_000 * GIB


def test_the_table_names_every_part():
    need = estimate(qwen("7B"), TURNS, **RUN)
    assert len(table(need).splitlines()) == len(need) - 2  # all but "certain" and "peak"


# ------------------------------------------------------------------ a GPU that cannot do it
def test_an_old_gpu_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(UserError, match=r"Tesla T4 has compute capability 7\.5 and no bfloat16; 8\.0 .* CUDA_VISIBLE_DEVICES="):
        load_model("tiny", ["player"], 4, True, seed=0)


def test_bitsandbytes_without_its_library_is_refused_in_a_sentence(monkeypatch):
    missing = bnb.cextension.ErrorHandlerMockBNBNativeLibrary("libbitsandbytes_cuda999.so: cannot open shared object file")
    monkeypatch.setattr(bnb.cextension, "lib", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    with pytest.raises(UserError, match="--four-bit: bitsandbytes .* found no library .* take --no-four-bit"):
        load_model("tiny", ["player"], 4, True, seed=0)


@pytest.mark.parametrize("four_bit, hint", [(True, "take a smaller model"), (False, "take --four-bit or a smaller model")])
def test_weights_that_do_not_fit_end_in_a_sentence(monkeypatch, four_bit, hint):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(UserError, match=f"--model tiny: its weights do not fit into the GPU's memory; {hint}"):
        load_model("tiny", ["player"], 4, four_bit, seed=0)


# ------------------------------------------------------------------ in the scripts
SCRIPTS = ["tango", "prime", "gar", "cure", "spin", "mae"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_loads_nothing_and_leaves_nothing(script, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "load_model", None)
    with pytest.raises(SystemExit) as ended:
        module.main(module.Args(dry_run=True))
    assert not ended.value.code and "peak of training" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", ["lora_rank", "micro_batch", "rows_at_once"])
def test_sizes_below_one_are_refused(script, name, tmp_path):
    module = importlib.import_module(script)
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} (0|-1)"):
        module.main(module.Args(**{name: 0 if name == "micro_batch" else -1, "out": str(tmp_path / "run")}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_estimate_is_of_what_the_script_loads_and_samples(script, tmp_path, monkeypatch):
    """As many adapters as load_model makes, as many of them in training as the optimiser has groups that learn; the limits of
    all players; and the trainer hears of the other arguments."""
    module = importlib.import_module(script)
    asked, made, adapters = [], [], []

    def load(name, names, *rest):
        adapters.extend(names)
        return load_model(name, names, *rest)

    monkeypatch.setattr(module, "check_memory", lambda args, turns, **how: asked.append((turns, how)))
    monkeypatch.setattr(module, "load_model", load)
    monkeypatch.setattr(Run, "train", lambda self, trainer, *_: made.append(trainer))
    module.main(module.Args(out=str(tmp_path), rows_at_once=7, eight_bit_adam=True, four_bit=False))
    (turns, how), (trainer,) = asked[0], made
    assert how["adapters"] + how.get("frozen_adapters", 0) == len(adapters)
    learning = {p.adapter for p in trainer.players.values() if p.lr}
    assert how["adapters"] == len(learning)
    assert {p.max_tokens for p in trainer.players.values()} == {completion for _, completion in turns}
    assert trainer.rows_at_once == 7 and trainer.args.optim == "paged_adamw_8bit" and not trainer.use_vllm
