"""LoRA adapters on a base model, one for each player; and what a chat template makes of prompts.

The papers train two or three full models. Here the base is loaded once (in 4-bit NF4 on a GPU that
it would not fit otherwise), and each trained player is a LoRA adapter on it. To switch players is
to switch a pointer. The base with all adapters off is the reference model.
"""

import re
from contextlib import contextmanager

from common.core.errors import ScriptError

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict


def add_players(model, adapters: list[str], lora_rank: int, seed: int):
    """Returns the base with a LoRA adapter for each name. All adapters are trainable and float32,
    on all linear layers but the head, with alpha = 2 * rank and without dropout. B is 0, so every
    player begins as the base itself.

    Args:
        model: a causal LM.
        adapters: names, at least one.
        lora_rank: rank of each adapter.
        seed: random seed of the matrices A.

    Raises:
        ScriptError: a part of the model has the name of an adapter.
    """
    parts = {part for name, _ in model.named_modules() for part in name.split(".")}
    for adapter in {*adapters} & ({"base_model", "model"} | parts):
        # when PEFT saves or copies this adapter, it would also take the part's weights
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
    """Copies the weights of the adapter `source`, A and B, into the adapter `target`."""
    state = get_peft_model_state_dict(model, adapter_name=source)
    set_peft_model_state_dict(model, state, adapter_name=target)


def reset_adapter(model, name: str, seed: int):
    """Makes an adapter untrained. B becomes 0, so its player is the base again. A is drawn anew
    from the seed, and is the same every time; the old A would keep what training has made of it.
    """
    rng = torch.Generator().manual_seed(seed)
    for key, p in model.named_parameters():
        if f".{name}." in key:
            # uniform between +- 1 / sqrt(columns), as PEFT draws A
            A = (2 * torch.rand(p.shape, generator=rng) - 1) / p.shape[1] ** 0.5
            p.data.copy_(A * ("lora_B" not in key))


@contextmanager
def without_checkpointing(model):
    """Turns activation checkpointing off inside this block, which needs no gradient. With
    checkpointing on, no layer would fill a cache.

    Trap: every time TRL's own switch turns checkpointing on again, it adds a hook to the embedding.
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
    """Returns the token ids of each prompt, up to the place where the answer begins. A prompt is a
    list of messages, to which the model's chat template is applied.

    If a message spells out a special token, a space takes its place. A player's prompt quotes
    another player's text. A `<|im_end|>` in this text would be read as the end of the message, and
    a generator could then write its verifier's verdict.
    """
    if not prompts:  # the template would refuse them
        return []
    marks = re.compile("|".join(map(re.escape, special_tokens(tokenizer))))
    prompts = [[m | {"content": marks.sub(" ", m["content"])} for m in p] for p in prompts]
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]


def prompt_text(prompt: list[dict]) -> str:
    """Returns what the report shows of a prompt, without instructions and worked examples. If one
    message is left, it is the message. Of a dialogue it is all messages, because several dialogues
    may end in the same words.

    >>> prompt_text([{"role": "system", "content": "Solve."}, {"role": "user", "content": "3+4"}])
    '3+4'
    >>> turns = {"user": "3+4", "assistant": "8"}, {"user": "Try again."}
    >>> print(prompt_text([{"role": r, "content": c} for turn in turns for r, c in turn.items()]))
    user: 3+4
    assistant: 8
    user: Try again.
    """
    turns = [m for m in prompt if m.get("role") != "system" and not m.get("example")]
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in turns)


def special_tokens(tokenizer) -> list[str]:
    """Returns the spellings of all special tokens, the longest first."""
    # Llama's <|start_header_id|> is in no list of named special tokens
    added = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
