"""Models that are broken, or whose parts do not fit each other, end in a sentence at load."""

import json
import shutil

from common.core.errors import UserError
from common.core.model import prompt_text
from common.run.models import (
    INSTRUCTIONS,
    QUESTION,
    SHARED_KEYS,
    UNSUPPORTED_HEADS,
    load_model,
    load_tokenizer,
    read_config,
)
from common.tasks.answers import prompt
from common.tiny import EMBEDDED, TINY
from spin import human_ids

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainers import SHAPE
from transformers import Qwen2Config, Qwen2ForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tiny Qwen2 with random weights and the small model's tokenizer."""
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("whole") / "model")
    torch.manual_seed(0)
    config = Qwen2Config(tie_word_embeddings=True, **SHAPE | {"vocab_size": 267})
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy to break."""
    return shutil.copytree(whole, tmp_path / "model")


def load(folder, four_bit=False):
    return load_model(str(folder), ["player"], 4, four_bit, seed=0)


# ------------------------------------------------------------------ config
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
SIZES |= {"num_attention_heads": 2, "vocab_size": 64}
QWEN = SIZES | {"model_type": "qwen2"}
GEMMA_TEXT = SIZES | {"model_type": "gemma3_text"}
SEES = {"model_type": "gemma3", "text_config": GEMMA_TEXT, "vision_config": SIZES}


@pytest.mark.parametrize(
    "values, says",
    [
        # adapters on its vision tower would never have a gradient
        (SEES, "gemma3 reads more than text"),
        (SIZES | {"model_type": "phi"}, "phi has a head with a bias"),
        (SIZES | {"model_type": "olmoe"}, "olmoe has experts"),
        (SIZES | {"model_type": "mixtral"}, "mixtral has experts"),
        (SIZES | {"model_type": "aria_text"}, "aria_text has experts"),
        ({"model_type": "phi4_multimodal"}, "phi4_multimodal reads more than text"),
        ({"model_type": "gemma4_text"}, "'head_dim'"),
        ({"model_type": "gpt_neo"}, "'NoneType'"),
        ({"model_type": "falcon_h1"}, "falcon_h1 is no plain transformer"),
        ({"model_type": "rwkv"}, "rwkv is no plain transformer"),
        *[(QWEN | {name: 30.0}, f"qwen2 has a head with {name}") for name in UNSUPPORTED_HEADS],
    ],
)
def test_a_model_that_we_do_not_train_is_refused(tmp_path, values, says):
    for fine in (GEMMA_TEXT, QWEN | dict.fromkeys(UNSUPPORTED_HEADS, 1.0)):  # switched off
        (tmp_path / "config.json").write_text(json.dumps(fine))
        assert read_config(str(tmp_path)).vocab_size == 64
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=says):
        read_config(str(tmp_path))


# ------------------------------------------------------------------ weights
def test_what_does_not_matter_is_left_alone(folder):
    """Tied weights that are stored twice, a value head, the frequencies of old checkpoints."""
    tensors = load_file(folder / WEIGHTS)
    tensors |= {"v_head.weight": torch.ones(2)}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for four_bit in (False, True):
        model, _ = load(folder, four_bit)
        norm = model.get_base_model().model.norm.weight
        assert torch.equal(norm.float().cpu(), tensors["model.norm.weight"])


# ------------------------------------------------------------------ tokenizer
ENDING = "{{ m['role'] }} {{ m['content'] }}<|pad|>\n{% endfor %}"
REFUSING = "{% if m['role'] == 'assistant' %}{{ raise_exception('') }}{% endif %}" + ENDING


@pytest.mark.parametrize(
    "template, stops, ends",
    [
        (ENDING, [4, 0], "<|pad|>"),
        (ENDING, 4, "<|end|>"),
        (ENDING, None, "<|end|>"),
        (REFUSING, [4, 0], "<|end|>"),
    ],
)
def test_answers_end_as_the_template_ends_them_if_the_model_stops_there(
    folder, template, stops, ends
):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}" + template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    tokenizer = load(folder)[1]
    assert tokenizer.eos_token == ends
    assert human_ids({"reference": "1"}, tokenizer)[-1] == tokenizer.eos_token_id


def test_a_models_own_habits_of_sampling_are_not_taken_over(folder):
    habits = {"eos_token_id": 4, "min_p": 0.1, "no_repeat_ngram_size": 2, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(habits | {"do_sample": True}))
    settings = load(folder)[0].get_base_model().generation_config
    assert settings.eos_token_id == 4
    assert all(getattr(settings, name) is None for name in habits if name != "eos_token_id")


def test_a_models_dropout_is_switched_off(folder):
    """StarCoder2's is 0.1; a player would write, be scored and be compared as three models."""
    rates = dict.fromkeys(("attention_dropout", "embedding_dropout", "residual_dropout"), 0.5)
    config = Starcoder2Config(**SHAPE | {"vocab_size": 267}, **rates)
    Starcoder2ForCausalLM(config).save_pretrained(folder)
    for four_bit in (False, True):
        model, _ = load(folder, four_bit)
        ids = torch.arange(5, 25)[None]
        assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


# ------------------------------------------------------------------ chat template
USER = "{% for m in messages %}{% if m['role'] == 'user' %}<u>{{ m['content'] }}{% endif %}"
USER += "{% endfor %}"  # as an early Phi-3: what the system says is lost
GEMMA = """{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}{% endif %}
<{{ m['role'] }}>{{ m['content'] | trim }}{% endfor %}{% if add_generation_prompt %}<model>
{% endif %}"""


def render(folder, messages) -> str:
    tokenizer = load_tokenizer(str(folder))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text.replace("\n<", "<").strip()


@pytest.mark.parametrize("template, ends", [(USER, ""), (GEMMA, "<model>")])
def test_without_a_system_role_instructions_go_to_the_user(folder, template, ends):
    (folder / "chat_template.jinja").write_text(template)
    said = [{"role": "user", "content": QUESTION}]
    user = "<u>" if template == USER else "<user>"
    assert render(folder, said) == f"{user}{QUESTION}{ends}"
    said = [{"role": "system", "content": INSTRUCTIONS}, *said]
    first = f"{user}{INSTRUCTIONS}\n\n{QUESTION}"
    assert render(folder, said) == f"{first}{ends}"
    said += [{"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    between = "" if template == USER else "<assistant>4"
    assert render(folder, said) == f"{first}{between}{user}Sure?{ends}"
    load(folder)


def test_a_template_that_knows_the_system_role_is_left_as_it_is(folder):
    """The small model's says in so many words that it leaves it out."""
    plain = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    for template in (plain, (TINY / "chat_template.jinja").read_text()):
        (folder / "chat_template.jinja").write_text(template)
        assert load_tokenizer(str(folder)).chat_template == template


@pytest.mark.parametrize("name", ["model", "q_proj", "base_model"])
def test_an_adapter_is_not_called_like_a_part_of_the_model(name):
    """PEFT would save another adapter's weights with it."""
    with pytest.raises(ValueError, match=f"an adapter cannot be called '{name}'"):
        load_model("tiny", ["player", name], 4, False, seed=0)


def test_no_head_gets_a_copy_of_the_keys_it_shares(monkeypatch):
    """By a switch of transformers; with a mask, as rows of unlike length have one."""
    model, _ = load_model("tiny", ["player"], 4, False, 0)
    given = {"input_ids": torch.arange(5, 15).view(2, 5), "attention_mask": torch.ones(2, 5)}
    given["attention_mask"][0, :2] = 0
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr("transformers.integrations.sdpa_attention.repeat_kv", None)
        ours = model(**given).logits
        patch.setenv(SHARED_KEYS, "0")
        with pytest.raises(TypeError):  # the copy
            model(**given)
        patch.undo()
        patch.setenv(SHARED_KEYS, "0")
        torch.testing.assert_close(ours[:, 2:], model(**given).logits[:, 2:], rtol=0, atol=1e-4)


# ------------------------------------------------------------------ worked examples
def test_worked_examples_are_turns_of_the_dialogue_and_the_small_models_leave_them_out(folder):
    examples = [("3+4", "seven"), ("5+6", "eleven")]
    with_examples, bare = prompt("Add.", "1+2", examples), prompt("Add.", "1+2")
    plain = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(plain)
    turns = "<user>3+4<assistant>seven<user>5+6<assistant>eleven"
    assert render(folder, with_examples) == f"<system>Add.{turns}<user>1+2"
    for small in EMBEDDED.values():
        assert render(small, with_examples) == render(small, bare) != ""
        dialogue = [*bare, {"role": "assistant", "content": "3"}, {"role": "user", "content": "?"}]
        assert "3" in render(small, dialogue)  # a turn that is no example stays
    assert prompt_text(with_examples) == prompt_text(bare) == "1+2"
