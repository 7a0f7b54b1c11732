"""A model on which continued SFT has nothing left to give; `benchmarks/evidence.py spin` runs it.

SPIN starts where SFT on the human answers has ended. So some embedded questions are written to a
file, the embedded model is trained on their right solutions for many passes, and the adapter is
merged into it: the folder is then a model like any other. Seed 21, which no experiment reports.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import spin  # noqa: E402
from common.model import load_model  # noqa: E402
from common.tasks.math import load_questions  # noqa: E402

from peft import set_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

QUESTIONS, STEPS, SEED = 1_200, 160, 21


def make(folder: Path):
    """folder/questions.jsonl and folder/model; nothing is done where they are already."""
    if (folder / "model" / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rows = load_questions("tiny", QUESTIONS, 1, SEED)[0]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"out": str(folder / "sft"), "dataset": str(data), "seed": SEED, "show_every": 0}
    spin.main(spin.Args(steps=STEPS, iterations=4, opponent="none", eval_every=0, **options))
    model, tokenizer = load_model("tiny", ["player"], spin.Args.lora_rank, False, SEED)
    adapter = load_file(folder / "sft" / "player" / "adapter_model.safetensors")
    set_peft_model_state_dict(model, adapter, adapter_name="player")
    model.merge_and_unload().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
