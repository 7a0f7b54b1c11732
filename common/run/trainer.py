"""What a run of several adapters changes in GRPOTrainer, and no optimiser step depends on:

    _get_train_sampler                       a resumed run continues in a later pass over the data
    log                                      Trainer's own loss, norm and rate are left out
    _save_checkpoint, _load_from_checkpoint  every adapter by name, and `saved`
    create_model_card                        none

requirements.txt pins TRL, and tests/common/test_trl_contract.py fails first if any of this moves.
"""

import json
from pathlib import Path

from common.run.checks import check_saved
from common.run.folder import seal

import torch
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from trl import GRPOTrainer


class ResumableTrainer(GRPOTrainer):
    """The base of AdapterTrainer, which sets `players`, `saved`, `_sums` and `_resumed_at`."""

    saved: dict
    """what a checkpoint keeps beside adapters, optimiser and random numbers; JSON"""

    def _get_train_sampler(self, dataset=None):
        """TRL's shuffles with random numbers that continue from pass to pass and are in no
        checkpoint: a run that resumes draws those of the passes before, or the first would repeat.
        """
        sampler = super()._get_train_sampler(dataset)
        rows = self._resumed_at * self.args.generation_batch_size
        for _ in range(rows // len(sampler) if rows and sampler.shuffle else 0):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def log(self, logs: dict, start_time: float | None = None):
        """Adds the step's means over all processes. Trainer's loss, norm and rate are of its own
        optimiser step, which has nothing to do; `update` logs each player's.
        """
        theirs = ("loss", "grad_norm", "learning_rate")
        ours = {key: x for key, x in logs.items() if key not in theirs}
        everyones = self.gather([self._sums])  # one collective call for all metrics
        self._sums = {}
        for name in dict.fromkeys(name for sums in everyones for name in sums):
            totals, counts = zip(*(sums.get(name, (0.0, 0)) for sums in everyones))
            if sum(counts):
                self._metrics["train"][name] = [sum(totals) / sum(counts)]
        super().log(ours, start_time)

    def create_model_card(self, *_, **__):
        """None: it could not name the base, nor say what the paper's players are."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # every process writes its own random numbers
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            check_saved(self.saved)
            (folder / "saved.json").write_text(json.dumps(self.saved))
            seal(folder)  # last: one that was cut short is not finished

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Every adapter by its own name; Trainer would load into the active one."""
        folder = Path(resume_from_checkpoint)
        for adapter in {player.adapter for player in self.players.values()}:
            state = load_file(folder / adapter / "adapter_model.safetensors")
            set_peft_model_state_dict(self.model, state, adapter_name=adapter)
        self.saved = json.loads((folder / "saved.json").read_text())
        self._resumed_at = int(folder.name.removeprefix("checkpoint-"))
