"""Loads the base and its adapters, and refuses models that a run cannot use. Each of these checks
ends in one sentence, before a run begins.
"""

import inspect
import os
import re
import textwrap
from pathlib import Path

from common import fast
from common.core.errors import UserError
from common.core.model import add_players
from common.run.machine import on_gpu
from common.tiny import EMBEDDED, ENDINGS
from common.tiny.tasks import misfit, parse_question

import torch
from bitsandbytes.nn import Linear4bit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)

UNSUPPORTED_HEADS = """final_logit_softcapping logits_soft_cap logit_scale logits_scaling
lm_head_multiplier output_multiplier""".split()
"""Settings of a config that change the logits after the head, which scoring does not."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NEEDED = ("attention_mask", "position_ids", "past_key_values")
"""Arguments that sampling and scoring give to the layers."""
INSTRUCTIONS, QUESTION = "Answer in one word.", "What is 2 + 2?"
SYSTEM_INTO_USER = """\
{%- if messages and messages[0]['role'] == 'system' -%}
{%- set both = messages[0]['content'] ~ '\n\n' ~ messages[1]['content'] -%}
{%- set messages = [{'role': 'user', 'content': both}] + messages[2:] -%}
{%- endif -%}
"""  # stands in front of a chat template without a system role, such as Gemma's


ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARED_KEYS = "TRANSFORMERS_SDPA_FORCE_GQA"
"""A switch that transformers reads at every call of attention."""


def load_model(
    name: str, adapters: list[str], lora_rank: int, four_bit: bool, seed: int, plain: bool = False
):
    """Returns (a PeftModel with a trainable adapter for each name, its tokenizer).

    Args:
        name: "tiny", "tiny-programs" or "tiny-repairs" (the small models), a hub id, or a folder.
        adapters: names, see `add_players`.
        lora_rank: rank of each adapter.
        four_bit: load the base in NF4 with double quantisation.
        seed: random seed of the adapters' A matrices.
        plain: keep the layers of transformers and PEFT.

    Raises:
        UserError: there is no such model, a part of it is broken or does not fit the other parts,
            or this GPU is too small or too old for it.
    """
    gpu = on_gpu(name)
    if gpu:
        check_gpu()
        # Trap: cuDNN's attention, the default on an H100, gives NaN gradients where a text is
        # padded and 64 tokens longer than a multiple of 128 (pytorch issue 196678)
        torch.backends.cuda.enable_cudnn_sdp(False)
    # on a CPU torch's attention takes keys and values that several query heads share as they are;
    # otherwise transformers copies them for each head, and the backward pass keeps the copies
    os.environ[SHARED_KEYS] = "0" if gpu else "1"
    dtype = torch.bfloat16 if gpu else torch.float32
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)
    tokenizer = load_tokenizer(name)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            EMBEDDED.get(name, name),
            config=without_dropout(name),
            dtype=dtype,
            quantization_config=quantization if four_bit else None,
            device_map={"": torch.cuda.current_device()} if gpu else None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except torch.OutOfMemoryError:
        smaller = "a smaller model" if four_bit else "--four-bit or a smaller model"
        raise UserError(
            f"--model {name}: its weights do not fit into the GPU's memory; take {smaller}."
        ) from None
    except Exception as error:  # what a broken file raises depends on its format and on the break
        raise not_loaded(name, error) from None
    check_weights(name, model, loading)
    keep_backward(model)
    check_one_prompt(name, model, tokenizer)
    tokenizer.eos_token = end_of_answer(model, tokenizer)
    # the model's generation config may hold settings of sampling (min_p, ...). They would fill in
    # what a player leaves open, and scoring does not know them
    ends = {name: getattr(model.generation_config, name) for name in ENDS}
    model.generation_config = GenerationConfig(**ends)
    model = add_players(model, adapters, lora_rank, seed)
    if not plain:
        fast.install(model, gpu)
    return model, tokenizer


# ------------------------------------------------------------------ the tokenizer
def load_tokenizer(name: str):
    """Returns the model's tokenizer, whose chat template shows both the instructions and the
    question.

    A template without a system role refuses instructions, or leaves them out silently. It is
    changed here, for everybody who uses the tokenizer, and puts them in front of the first user
    message.

    Raises:
        UserError: there is no tokenizer, or its chat template cannot be used.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED.get(name, name), padding_side="left")
        known = set(tokenizer(QUESTION).input_ids) - set(tokenizer.all_special_ids)
        given = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    except Exception as error:
        raise not_loaded(name, error) from None
    if not known or not given.strip():
        lacks = "tokens" if not known else "chat template; take an instruction-tuned model"
        raise UserError(f"--model {name}: its tokenizer has no {lacks}.")
    reason = "it leaves out what the user says"
    for template in (given, SYSTEM_INTO_USER + given):
        tokenizer.chat_template = template
        try:
            text = example_prompt(tokenizer)
        except Exception as error:  # a template is a program
            reason = f"{type(error).__name__}: {error}"
            continue
        if QUESTION in text and (INSTRUCTIONS in text or "system" in given):
            return tokenizer
    raise UserError(f"--model {name}: its chat template cannot be used ({reason}).")


def example_prompt(tokenizer) -> str:
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def end_of_answer(model, tokenizer) -> str:
    """Returns the token with which the chat template ends an answer, if the model stops at it when
    it writes; otherwise the tokenizer's end token.

    For gemma-3-it, for example, the two are <end_of_turn> and <eos>. A given answer that ended in
    <eos> could be told from the model's own answers by its last token.
    """
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    answered = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "4"}]
    try:
        ids = tokenizer.apply_chat_template(answered, return_dict=True)["input_ids"]
    except Exception:  # a template is a program; this one knows no answers
        return tokenizer.eos_token
    ends = [token for token in ids if token in stops]
    return tokenizer.convert_ids_to_tokens(ends[-1]) if ends else tokenizer.eos_token


# ------------------------------------------------------------------ the weights
def check_weights(name: str, model, loading: dict):
    """Raises UserError if the files do not hold this model. Weights that they lack would be random
    numbers, and weights that are left over belong to another model.

    loading: from_pretrained's report, in which tied weights are not missing.
    """
    base = f"{model.base_model_prefix}."
    lists = [n for n, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    layers = tuple(f"{n.removeprefix(base)}." for n in lists)
    wrong = {
        "missing": loading["missing_keys"],
        "of another shape": [key for key, *_ in loading["mismatched_keys"]],
        # a value head or an image encoder does not matter; biases or more layers do
        "left over": [
            key for key in loading["unexpected_keys"] if key.removeprefix(base).startswith(layers)
        ],
    }
    found = [f"{len(keys)} {what} ({min(keys)}, ...)" for what, keys in wrong.items() if keys]
    if found:
        raise UserError(
            f"--model {name}: its weights are not those of its config.json; of the tensors, "
            f"{' and '.join(found)}."
        )


def check_one_prompt(name: str, model, tokenizer):
    """Raises UserError if the tokenizer does not fit the weights, or the logits are not finite."""
    ids = tokenizer(example_prompt(tokenizer), add_special_tokens=False).input_ids
    end, rows = tokenizer.eos_token_id, model.get_input_embeddings().num_embeddings
    if end is None:
        raise UserError(f"--model {name}: its tokenizer has no end token; no text would ever end.")
    padding = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if (largest := max(*ids, end, padding)) >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise UserError(  # on a GPU it would end the process in no words at all
            f"--model {name}: its tokenizer does not fit its weights: token {largest}, {token}, is "
            f"beyond the {rows} rows of the embedding."
        )
    with torch.no_grad():
        logits = model(torch.tensor([ids], device=model.device)).logits  # (1, T, V)
    if not logits.isfinite().all():
        raise UserError(f"--model {name}: its weights make logits that are not finite.")


def not_taught(model: str, name: str, texts: list[str]) -> list[tuple[str, str]]:
    """Returns warnings, each as (sentence, what it quotes), about what a player is asked. A small
    model ignores instructions, and must have been taught to answer some of the texts.

    Args:
        model: the argument --model.
        name: the player.
        texts: the user's messages.
    """
    said, endings = [], "|".join(ENDINGS.get(model, ()))
    if endings and not any(parse_question(t) or re.search(f"(?:{endings})$", t) for t in texts):
        asked = f"the small model has not been taught to answer what the {name} is asked"
        quoted = " ".join(texts[0].split()[-8:])[-160:]
        more = f" ({quoted!r}); docs/test-bed.md lists what it understands"
        said.append((asked, more))
    odd = [found for text in texts if (found := misfit(text))]
    if model == "tiny" and len(odd) > len(texts) / 2:
        asked = f"the small model has not been taught what the {name} is asked: {odd[0]}"
        said.append((asked, ""))
    return said


# ------------------------------------------------------------------ before anything is loaded
def read_config(name: str):
    """Returns the model's transformers config, without its weights.

    Raises:
        UserError: there is no config, or such a model cannot be trained here.
    """
    check_folder(name)
    try:
        config = AutoConfig.from_pretrained(EMBEDDED.get(name, name), trust_remote_code=False)
        with torch.device("meta"):  # all of the model but its memory
            model = AutoModelForCausalLM.from_config(config)
        check_architecture(config, model)
    except Exception as error:
        raise not_loaded(name, error) from None
    return config


def check_architecture(config, model):
    """Raises ValueError, or what `sizes` raises, unless this is a dense decoder of text alone,
    whose head is linear.
    """
    takes = {*inspect.signature(model.base_model.forward).parameters}
    heads = [s for s in UNSUPPORTED_HEADS if getattr(config, s, None) not in (None, 1.0)]
    for kind, found in {
        # "all-linear" would also put adapters on the vision layers, which never have a gradient
        "reads more than text": config.get_text_config() is not config or config.sub_configs,
        # they are no linear layers: no adapter would reach them, and 4-bit would leave them whole
        "has experts": any(getattr(config, count, None) for count in EXPERTS),
        # fused kernels take their weights without the adapters; their states are no KV cache
        "is no plain transformer": getattr(config, "mamba_d_state", 0) or not {*NEEDED} <= takes,
        f"has a head with {' and '.join(heads)}": heads,
    }.items():
        if found:
            raise ValueError(f"{config.model_type} {kind}, and such a model is not supported")
    if model.get_output_embeddings().bias is not None:
        raise ValueError(f"{config.model_type} has a head with a bias, which is not supported")
    sizes(config)  # GPT-2 has no intermediate_size, Gemma 4 no head_dim of all its layers


def check_folder(name: str):
    """Raises UserError for a folder that holds adapters and no model, as a run or a checkpoint."""
    found = [*Path(name).glob("adapter_config.json"), *Path(name).glob("*/adapter_config.json")]
    if found and not os.path.exists(f"{name}/config.json"):
        adapters = ", ".join(sorted(path.parent.name for path in found))
        raise UserError(
            f"--model {name}: has no model, only an adapter ({adapters}); PEFT's merge_and_unload "
            f"merges it into its base, and save_pretrained writes a model."
        )


def sizes(config) -> tuple[int, ...]:
    """Returns H, I (the width of the MLP), the number of layers, A = heads * head size, K (the same
    for keys), and V.
    """
    H, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    head = getattr(config, "head_dim", None) or H // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    return H, int(config.intermediate_size), layers, heads * head, keys * head, config.vocab_size


def not_loaded(name: str, error: Exception) -> UserError:
    said = textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" ...")
    return UserError(f"--model {name}: cannot be loaded or used here ({said}).")


def check_gpu():
    """Raises UserError if this GPU cannot run the model."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 0):
        raise UserError(
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor} and no "
            f"bfloat16; 8.0 (Ampere, 2020) or newer is needed. CUDA_VISIBLE_DEVICES= in front of "
            f"the command runs it on the CPU."
        )


def keep_backward(model):
    """Trap: on a CPU with AVX512-BF16, bitsandbytes repacks a 4-bit layer for inference at its
    first forward pass in eval mode, and the packed layer has no backward pass.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def without_dropout(name: str):
    """Returns the model's config, with every dropout rate set to 0. With a dropout, such as
    StarCoder2's, each pass of a training step would run another model: to sample, to score, and for
    the reference.
    """
    config = AutoConfig.from_pretrained(EMBEDDED.get(name, name))
    rates = [key for key, x in vars(config).items() if "drop" in key and isinstance(x, float)]
    config.update(dict.fromkeys(rates, 0.0))
    return config
