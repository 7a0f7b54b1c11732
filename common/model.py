"""One base model, and on it one LoRA adapter per player; and what a chat template makes of prompts.

The papers train two or three full models. Here the base is loaded once (on a GPU in 4-bit NF4 where
it would not fit otherwise) and each trained player is a LoRA adapter on it. Switching players
switches a pointer, and the base with all adapters off is the reference model.
"""

import os
import re
from contextlib import contextmanager

from common import fast
from common.errors import ScriptError, UserError
from common.run.machine import on_gpu
from common.run.models import (
    check_gpu,
    check_one_prompt,
    check_weights,
    end_of_answer,
    keep_backward,
    load_tokenizer,
    not_loaded,
    without_dropout,
)
from common.tiny import EMBEDDED

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
)

ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARED_KEYS = "TRANSFORMERS_SDPA_FORCE_GQA"
"""A switch that transformers reads at every call of attention."""


def load_model(
    name: str, adapters: list[str], lora_rank: int, four_bit: bool, seed: int, plain: bool = False
):
    """(PeftModel with a trainable adapter per name in `adapters`, tokenizer).

    Args:
        name: "tiny", "tiny-programs", "tiny-repairs" (embedded), a hub id, or a local folder.
        adapters: a LoRA adapter each, on all linear layers but the head; alpha = 2 * rank, no
            dropout, B = 0, so that every player starts as the base itself.
        four_bit: load the base in NF4 with double quantisation.
        seed: random seed of the adapters' A matrices.
        plain: keep the layers of transformers and PEFT.

    Raises:
        UserError: there is no such model, a part of it is broken or does not fit the others, or
            this GPU cannot hold or run it.
    """
    gpu = on_gpu(name)
    if gpu:
        check_gpu(four_bit)
        # Trap: cuDNN's attention, the default on an H100, gives NaN gradients where a text is
        # padded and 64 tokens longer than a multiple of 128 (pytorch issue 196678)
        torch.backends.cuda.enable_cudnn_sdp(False)
    # several query heads share keys and values, which torch's attention takes as they are on a CPU;
    # else transformers copies them for each head, and the backward pass keeps the copies
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
        raise not_loaded(name, "weights", error, " Is the download whole?") from None
    check_weights(name, model, loading)
    keep_backward(model)
    check_one_prompt(name, model, tokenizer)
    tokenizer.eos_token = end_of_answer(model, tokenizer)
    # what it says about sampling (min_p, ...) would fill in what a player leaves open, and scoring
    # knows nothing of it
    ends = {name: getattr(model.generation_config, name) for name in ENDS}
    model.generation_config = GenerationConfig(**ends)
    model = add_players(model, adapters, lora_rank, seed)
    if not plain:
        fast.install(model, gpu)
    return model, tokenizer


def add_players(model, adapters: list[str], lora_rank: int, seed: int):
    """The base with an adapter per name, as `load_model` says, all trainable; PEFT makes them
    float32.
    """
    parts = {part for name, _ in model.named_modules() for part in name.split(".")}
    for adapter in {*adapters} & ({"base_model", "model"} | parts):
        # PEFT would take the wrong weights for its own when it saves or copies an adapter
        raise ScriptError(f"an adapter cannot be called {adapter!r}: a part of the model is")
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, lora, adapter_name=adapters[0])
    for adapter in adapters[1:]:
        model.add_adapter(adapter, lora)
    model.set_requires_grad(adapters)  # add_adapter leaves only the active one trainable
    return model


def copy_adapter(model, source: str, target: str):
    """Copies the weights of the adapter `source` into the adapter `target`."""
    state = get_peft_model_state_dict(model, adapter_name=source)
    set_peft_model_state_dict(model, state, adapter_name=target)


@contextmanager
def without_checkpointing(model):
    """Turns activation checkpointing off inside this block, which needs no gradient; under it no
    layer fills a cache.

    Trap: TRL's own switch adds one more hook to the embedding every time it is turned on again.
    """
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in modules:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True


# ------------------------------------------------------------------ prompts
def tokenize(prompts: list[list[dict]], tokenizer) -> list[list[int]]:
    """Applies the model's chat template to messages -> token ids, up to where the answer begins.

    Every spelling of a special token in a message becomes a space. A player's prompt quotes another
    player's text, and a `<|im_end|>` in this text would be read as the end of the message: the
    writer could go on in the judge's place.
    """
    if not prompts:  # the template would refuse them
        return []
    marks = re.compile("|".join(map(re.escape, special_tokens(tokenizer))))
    prompts = [[m | {"content": marks.sub(" ", m["content"])} for m in p] for p in prompts]
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]


def prompt_text(prompt: list[dict]) -> str:
    """Returns what the report shows of a prompt: its last message; of a dialogue all messages but
    the system's, because several dialogues may end in the same words.

    >>> prompt_text([{"role": "system", "content": "Solve."}, {"role": "user", "content": "3+4"}])
    '3+4'
    >>> turns = {"user": "3+4", "assistant": "8"}, {"user": "Try again."}
    >>> print(prompt_text([{"role": r, "content": c} for turn in turns for r, c in turn.items()]))
    user: 3+4
    assistant: 8
    user: Try again.
    """
    turns = [message for message in prompt if message.get("role") != "system"]
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in turns)


def special_tokens(tokenizer) -> list[str]:
    """Returns the spellings of all special tokens, the longest first."""
    # Llama's <|start_header_id|> is in no list of named special tokens
    added = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
