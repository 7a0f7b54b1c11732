"""A model card for every player of a finished run, README.md in its folder: what it is, on which
base, how it was made, what was measured. Whoever uploads the folder to the Hub has it there.
"""

import json
from pathlib import Path

from common.tiny import MODELS

CARD = """---
library_name: peft
{base_line}tags:
- {script}
- generator-verifier co-training
---

# {player}

The player `{player}` of `{script}.py`, a LoRA adapter on {base}.

```python
base = AutoModelForCausalLM.from_pretrained("{model}")
model = PeftModel.from_pretrained(base, FOLDER_OR_ID)
```

Held-out figures before training and after {steps} steps, seed {seed}:

| metric | before | after |
|---|---|---|
{figures}
The run's arguments:

```json
{arguments}
```
"""


def write_cards(folder: Path, script: str, players: list[str], evaluations: list[dict]):
    """folder: the run's, with a folder for each of the players' adapters; evaluations: the lines of
    metrics.jsonl that have held-out figures.
    """
    arguments = json.loads((folder / "args.json").read_text())
    first, last = evaluations[0], evaluations[-1]
    figures = ""
    for key, after in last.items():
        if key.startswith("eval/"):
            before = f"{first[key]:.3f}" if key in first else "-"
            figures += f"| {key[5:]} | {before} | {after:.3f} |\n"
    model = arguments["model"]
    model = f"common/tiny/{MODELS[model]}" if model in MODELS else model
    on_hub = not Path(model).exists() and "/" in model
    for player in players:
        card = CARD.format(
            base_line=f"base_model: {model}\n" if on_hub else "",
            base=f"[{model}](https://huggingface.co/{model})" if on_hub else f"`{model}`",
            script=script,
            player=player,
            model=model,
            steps=last["step"],
            seed=arguments["seed"],
            figures=figures,
            arguments=json.dumps(arguments, indent=1),
        )
        (folder / player).mkdir(exist_ok=True)
        (folder / player / "README.md").write_text(card)
