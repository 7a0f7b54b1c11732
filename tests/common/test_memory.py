"""common/run/memory.py: exact parts are counted in tensors, estimates measured with a profiler."""

import gc
import json
import shutil
import types

from common.checked import Player
from common.core.cotrainer import with_adapters
from common.core.errors import UserError
from common.fast.scoring import packed
from common.run import launch, memory
from common.run.memory import (
    GIB,
    QUESTION_TOKENS,
    available,
    estimate,
    plan_memory,
    shapes,
)
from common.run.models import SHARED_KEYS, load_model, read_config
from common.tasks import answers, verdicts
from common.tiny import TINY

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from conftest import SCRIPTS, module_of
from peft import LoraConfig, get_peft_model
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
)

SHAPES = {  # as published: hidden size, width of the MLP, layers, heads, key and value heads
    "0.5B": (896, 4864, 24, 14, 2),
    "7B": (3584, 18944, 28, 28, 4),
}
KEYS = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
SMALL = dict(zip(KEYS.split(), (128, 512, 3, 4, 2))) | {"vocab_size": 512, "head_dim": 32}
RUN = {"adapters": 2, "lora_rank": 16, "four_bit": True, "rows": 64, "micro_batch": 4}
TURNS = [(QUESTION_TOKENS, 1024), (QUESTION_TOKENS + 1024, 1024)]
PLAYERS = {"writer": Player([], 1e-3, 1024), "reader": Player([], 1e-3, 1024, reads=1024)}
PLAYERS = with_adapters(PLAYERS)  # TURNS as a script gives them


def qwen(size: str) -> Qwen2Config:
    shape, tied = dict(zip(KEYS.split(), SHAPES[size])), size != "7B"
    vocab = 151936 if tied else 152064
    return Qwen2Config(**shape, tie_word_embeddings=tied, vocab_size=vocab)


# ------------------------------------------------------------------ exact parts
@pytest.mark.parametrize("size, published", [("0.5B", 0.494e9), ("7B", 7.62e9)])
def test_parameters_are_those_published(size, published):
    linear, other, q_norm = shapes(qwen(size))
    assert sum(i * o for i, o in linear) + other == pytest.approx(published, rel=5e-3)
    assert len(linear) == 7 * qwen(size).num_hidden_layers and not q_norm


def stored(tensors) -> int:
    """Bytes of all storages behind these tensors, each once."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_adapters_and_adams_state_are_what_load_model_makes(tmp_path, four_bit, tied):
    # 128 * 328 entries do not fill their last block
    shape = SMALL | {"vocab_size": 273, "intermediate_size": 328}
    config = Qwen2Config(**shape, tie_word_embeddings=tied)
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)  # for its tokenizer
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, _ = load_model(str(tmp_path), ["one", "two", "three"], 4, four_bit, seed=0)
    lora = {name: p for name, p in model.named_parameters() if "lora_" in name}
    optimizer = torch.optim.AdamW([p for name, p in lora.items() if ".three." not in name])
    for p in lora.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    names = ("exp_avg", "exp_avg_sq")
    moments = [state[name] for state in optimizer.state.values() for name in names]
    tensors = [p for name, p in model.named_parameters() if "lora_" not in name]
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            state = layer.weight.quant_state
            tensors += [state.absmax, state.code, state.offset]
            tensors += [state.state2.absmax, state.state2.code]
    change = {"lora_rank": 4, "four_bit": four_bit, "frozen_adapters": 1, "entry": 4}
    need = estimate(read_config(str(tmp_path)), TURNS, **RUN | change)
    assert need["weights"] == stored(tensors)
    assert need["adapters"] == stored(lora.values()) == 3 * need["gradients"]
    assert need["adam"] == stored(moments)


def test_each_of_several_processes_has_buckets_for_all_adapters():
    run = RUN | {"adapters": 3}
    one, two = (estimate(Qwen2Config(**SMALL), TURNS, **run, processes=n) for n in (1, 2))
    assert one["adapters"] == 3 * one["gradients"] == two["gradients"] - one["gradients"]


def test_kv_cache_is_that_of_a_dynamic_cache():
    config = Qwen2Config(**SMALL)
    model, cache = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.ones(5, 30, dtype=torch.long), past_key_values=cache)
    held = stored([t for layer in cache.layers for t in (layer.keys, layer.values)])
    need = estimate(config, [(10, 20), (12, 3)], **RUN | {"rows": 5})
    assert need["kv_cache"] == held


# ------------------------------------------------------------------ estimated parts
def peak(function) -> int:
    """The most bytes that `function` has allocated at a time, by torch's own CPU allocator."""
    gc.collect()  # what others have left would be freed in between
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


ONE_ADAPTER = {"adapters": 1, "lora_rank": 8, "four_bit": False}


def bf16_model(kind: str):
    config = AutoConfig.for_model(kind, **SMALL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lora = LoraConfig(r=8, target_modules="all-linear")
    model = get_peft_model(model, lora, adapter_name="player")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return config, model


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_activations_of_training(monkeypatch, kind, checkpointing):
    """Of rows that have their first token in common. On a GPU, the layers' own kernels."""
    monkeypatch.setenv(SHARED_KEYS, "0")
    config, model = bf16_model(kind)
    base = model.get_base_model()
    if checkpointing:
        base.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    rows, prompt, completion = 2, 32, 96
    ids = torch.ones(rows, prompt + completion, dtype=torch.long)
    ids[0, 1:] = 2

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            states, _ = packed(base.model, ids, torch.tensor(0))
        states.backward(torch.ones_like(states))

    step()  # gradients exist from here on
    change = {"rows": rows, "micro_batch": rows, "checkpointing": checkpointing}
    need = estimate(config, [(prompt, completion)], **ONE_ADAPTER | change)
    assert need["kept"] + need["layer"] == pytest.approx(peak(step), rel=0.04)


def test_peak_of_sampling():
    config, model = bf16_model("qwen2")
    rows, prompt, completion = 16, 128, 16
    ids = torch.ones(rows, prompt, dtype=torch.long)
    mask = ids.clone()
    mask[0, :5] = 0
    length = {"max_new_tokens": completion, "min_new_tokens": completion, "prefill_chunk_size": 64}
    settings = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, **length)
    inputs = {"input_ids": ids, "attention_mask": mask, "generation_config": settings}
    with torch.autocast("cpu", torch.bfloat16):
        measured = peak(lambda: model.generate(**inputs))
    need = estimate(config, [(prompt, completion)], **ONE_ADAPTER, rows=rows, micro_batch=1)
    assert need["kv_cache"] < measured  # a lower bound that is exact
    assert need["sampling"] - need["certain"] == pytest.approx(measured, rel=0.25)


# ------------------------------------------------------------------ behaviour
def arguments(model, **change):
    sizes = {
        "lora_rank": 16,
        "micro_batch": 32,
        "generation_batch_size": 256,
        "gradient_checkpointing": "on",
    }
    flags = {"four_bit": True, "dry_run": True, "rollouts": None}
    return types.SimpleNamespace(**{"model": str(model), **sizes, **flags, **change})


@pytest.fixture
def card(monkeypatch):
    """card(24): a GPU with 24 GiB free, as far as plan_memory can tell."""

    def put_in(gib: float):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Imaginary 24")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(gib * GIB),) * 2)

    return put_in


@pytest.fixture
def folder(tmp_path):
    """Nothing but a config: an estimate needs neither weights nor a tokenizer."""
    qwen("7B").save_pretrained(tmp_path)
    return tmp_path


def test_only_what_is_certain_is_refused_without_dry_run(folder, card, capsys):
    card(23)
    plan_memory(arguments(folder, dry_run=False), PLAYERS)  # activations are estimated: a warning
    assert "warning" in capsys.readouterr().out
    for gib, four_bit in ((5, True), (12, False)):
        card(gib)
        with pytest.raises(UserError, match=f"are needed, and there are {gib}.0 GiB") as refused:
            plan_memory(arguments(folder, four_bit=four_bit, dry_run=False), PLAYERS)
        assert ("--four-bit" in str(refused.value)) == (not four_bit)
    card(23)
    with pytest.raises(UserError, match="are needed"):
        plan_memory(arguments(folder), PLAYERS)


def test_a_pair_is_two_rows_and_a_frozen_adapter_has_no_moments(folder, card, monkeypatch):
    card(23)
    needs = []  # the last one is that of the plan
    keep = lambda *given, **more: needs.append(estimate(*given, **more)) or needs[-1]  # noqa: E731
    monkeypatch.setattr(memory, "estimate", keep)
    args = arguments(folder, generation_batch_size=16, micro_batch=8, dry_run=False)
    pairs = with_adapters({"a": Player([], 1e-3, 1024, rows=2), "b": Player([], 0.0, 1024)})
    rows = with_adapters({"a": Player([], 1e-3, 1024), "b": Player([], 1e-3, 1024)})
    found, expected = (plan_memory(args, players) and needs[-1] for players in (pairs, rows))
    assert found["kept"] == 2 * expected["kept"]
    assert found["adapters"] == expected["adapters"]
    assert 2 * found["adam"] == expected["adam"]


@pytest.mark.parametrize(
    "gib, rows, checkpointing", [(110, 256, "off"), (40, 128, "on"), (13, 32, "on")]
)
def test_what_is_left_open_is_as_much_as_fits(folder, card, capsys, gib, rows, checkpointing):
    card(gib)
    args = arguments(
        folder,
        generation_batch_size=None,
        gradient_checkpointing="auto",
        micro_batch=4,
        dry_run=False,
    )
    plan = plan_memory(args, PLAYERS)
    assert (plan.generation_batch_size, plan.gradient_checkpointing) == (rows, checkpointing)
    assert args.generation_batch_size is None  # it is not written into the arguments
    assert gib < 100 or capsys.readouterr().out == ""  # where everything fits nothing is said
    need = lambda **k: estimate(qwen("7B"), TURNS, **RUN | k)  # noqa: E731
    assert need(rows=rows)["sampling"] <= gib * GIB
    assert rows == 256 or need(rows=2 * rows)["sampling"] > gib * GIB
    plain = need(micro_batch=4, checkpointing=False, gpu_bytes=gib * GIB)
    assert (plain["training"] > gib * GIB) == (checkpointing == "on")


@pytest.mark.parametrize("gib, rows, four_bit", [(100, None, False), (23, None, True), (23, 1, 0)])
def test_four_bits_only_where_sixteen_do_not_fit(folder, card, capsys, gib, rows, four_bit):
    """Beside 64 rows that are sampled, or fewer where fewer are asked for."""
    card(gib)
    args = arguments(
        folder, four_bit=None, micro_batch=1, generation_batch_size=rows, dry_run=False
    )
    assert plan_memory(args, PLAYERS).four_bit == four_bit
    said = "so it is loaded in 4-bit; --no-four-bit" if four_bit else "which it gets"
    assert f"and {gib}.0 GiB are free, {said}" in capsys.readouterr().out
    whole = {"four_bit": False, "micro_batch": 1, "gpu_bytes": gib * GIB, "rows": rows or 64}
    assert (estimate(qwen("7B"), TURNS, **RUN | whole)["peak"] > gib * GIB) == four_bit


PHI = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
PHI = Phi3Config(rope_scaling=PHI, original_max_position_embeddings=4096, pad_token_id=0)
DYNAMIC = LlamaConfig(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=4096)


@pytest.mark.parametrize("config", [PHI, DYNAMIC])
def test_texts_end_before_the_rope_changes(tmp_path, card, config):
    """Phi-4-mini's: what was sampled before would be scored as if it came after."""
    card(1000)
    config.save_pretrained(tmp_path)
    for tokens, ends in ((2816, SystemExit), (2817, UserError)):  # after a prompt of 1,280
        with pytest.raises(ends, match="4,096 tokens, and a prompt" if ends is UserError else ""):
            plan_memory(arguments(tmp_path), with_adapters({"a": Player([], 1e-3, tokens)}))


# ------------------------------------------------------------------ in the scripts
@pytest.mark.parametrize("script", ["tango.py", "spin.py", "cure.py"])
def test_a_dry_run_loads_nothing_and_leaves_nothing(script, tmp_path, monkeypatch, capsys):
    module = module_of(script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "load_model", None)
    with pytest.raises(SystemExit) as ended:
        module.main(module.Args(dry_run=True))
    said = capsys.readouterr().out
    assert (
        not ended.value.code
        and "peak of training" in said
        and "memory that this process may use" in said
    )
    assert GIB / 4 < available(gpu=False)[1] < 10_000 * GIB
    assert not list(tmp_path.iterdir())


def test_instructions_examples_and_question_are_as_long_as_planned(real_data):
    """Of every script, in tokens of Qwen2.5: its longest instructions with its longest examples."""
    tokenizer = AutoTokenizer.from_pretrained(real_data / "qwen2.5-tokenizer")
    length = lambda text: len(tokenizer(text).input_ids)  # noqa: E731
    rows = map(json.loads, (real_data / "gsm8k_test.jsonl").open())
    question = max(length(row["question"]) for row in rows)
    for module in [answers, verdicts, *map(module_of, SCRIPTS)]:
        values = [value for name, value in vars(module).items() if not name.startswith("__")]
        texts, of_turns = [x for x in values if isinstance(x, str)], [0]
        for value in values:
            pairs = isinstance(value, list) and value and all(map(is_example, value))
            of_turns.append(sum(length(t) + 5 for pair in value for t in pair) if pairs else 0)
        assert max(map(length, texts), default=0) + max(of_turns) + question <= QUESTION_TOKENS, (
            module
        )


def is_example(value) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, str) for x in value)
