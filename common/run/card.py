"""Writes a model card for every player of a finished run: README.md in the player's folder, with
what PEFT and the Hub read, and with the held-out figures. If the folder is uploaded to the Hub, the
card is there.
"""

import json
from pathlib import Path

from common.tiny import MODELS

CARD = """---
library_name: peft
pipeline_tag: text-generation
tags: [{script}, generator-verifier co-training]
{base}---

# {player}

The player `{player}` of `{script}.py`, a LoRA adapter on `{model}`. Held out, before training and
after {steps} steps:

| metric | before | after |
|---|---|---|
{figures}
```json
{arguments}
```
"""


def write_cards(folder: Path, script: str, players: list[str], evaluations: list[dict]):
    """Writes the cards.

    Args:
        folder: the run's folder, which has a folder for each adapter.
        script: its name, without .py.
        players: names of the adapters.
        evaluations: the lines of metrics.jsonl that have held-out figures.
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
    on_hub = not Path(model).exists() and "/" in model  # the Hub refuses any other base_model
    known = {"script": script, "model": model, "steps": last["step"], "figures": figures}
    known["base"] = f"base_model: {json.dumps(model)}\n" if on_hub else ""
    known["arguments"] = json.dumps(arguments, indent=1)
    for player in players:
        (folder / player).mkdir(exist_ok=True)
        (folder / player / "README.md").write_text(CARD.format(player=player, **known))
