"""One base model, and on it one LoRA adapter per player.

The papers train two or three full models. Here the base is loaded once (on a GPU in 4-bit NF4) and
each trained player is a LoRA adapter on it. Switching players switches a pointer, and the base with
all adapters off is the reference model.
"""

from pathlib import Path

from common.errors import UserError

import bitsandbytes.cextension
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

TINY = Path(__file__).parent / "tiny" / "model"


def load_model(name: str, adapters: list[str], lora_rank: int, four_bit: bool, seed: int):
    """(PeftModel with a trainable adapter per name in `adapters`, tokenizer).

    Args:
        name: "tiny" (the embedded default), a hub id, or a local folder.
        adapters: a LoRA adapter each, on all linear layers but the head; alpha = 2 * rank, no
            dropout, B = 0, so that every player starts as the base itself.
        four_bit: load the base in NF4 with double quantisation.
        seed: random seed of the adapters' A matrices.

    Raises:
        UserError: there is no such model, or this GPU cannot hold or run it.
    """
    path = TINY if name == "tiny" else name
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        check_gpu(four_bit)
    compute_dtype = torch.bfloat16 if on_gpu else torch.float32
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=compute_dtype,
            quantization_config=quantization if four_bit else None,
            device_map={"": torch.cuda.current_device()} if on_gpu else None,
        )
    except torch.OutOfMemoryError:
        smaller = "a smaller model" if four_bit else "--four-bit or a smaller model"
        raise UserError(
            f"--model {name}: its weights do not fit into the GPU's memory; take {smaller}."
        ) from None
    except (OSError, ValueError) as error:
        raise not_found(name, error) from None
    if tokenizer.chat_template is None:
        raise UserError(
            f"--model {name}: its tokenizer has no chat template; take an instruction-tuned model."
        )
    for module in model.modules():
        if isinstance(module, Linear4bit):
            # Trap: on a CPU with AVX512-BF16, bitsandbytes repacks a layer for inference at its
            # first forward pass in eval mode, and the packed layer has no backward pass.
            module.support_avx512bf16_for_cpu = False
    return add_players(model, adapters, lora_rank, seed), tokenizer


def add_players(model, adapters: list[str], lora_rank: int, seed: int):
    """The base with an adapter per name, as `load_model` says, all trainable and in float32."""
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, lora, adapter_name=adapters[0])
    for adapter in adapters[1:]:
        model.add_adapter(adapter, lora)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(True)  # add_adapter leaves only the active one trainable
            parameter.data = parameter.data.float()  # Adam's steps of 1e-5 vanish in 16 bits
    return model


# ------------------------------------------------------------------ before anything is loaded
def read_config(name: str):
    """The model's transformers config, without its weights."""
    try:
        return AutoConfig.from_pretrained(TINY if name == "tiny" else name)
    except (OSError, ValueError) as error:
        raise not_found(name, error) from None


def not_found(name: str, error: Exception) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UserError(
        f"--model {name}: not 'tiny', and neither a local folder nor the hub could give it "
        f"({reason})."
    )


def check_gpu(four_bit: bool):
    """Raises UserError if this GPU, or bitsandbytes on it, cannot run the model."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 0):
        raise UserError(
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor} and no "
            f"bfloat16; 8.0 (Ampere, 2020) or newer is needed. CUDA_VISIBLE_DEVICES= in front of "
            f"the command runs it on the CPU."
        )
    missing = bitsandbytes.cextension.ErrorHandlerMockBNBNativeLibrary
    if four_bit and isinstance(bitsandbytes.cextension.lib, missing):
        raise UserError(
            f"--four-bit: bitsandbytes {bitsandbytes.__version__} found no library of its own for "
            f"CUDA {torch.version.cuda} (python -m bitsandbytes says why). Install a version that "
            f"has one, or take --no-four-bit."
        )
