"""Rollouts by a vLLM server that the user has started (`--rollouts URL`), in place of our sampler.

The server holds the base. When a player first writes after a change, its adapter is published to
the server as PEFT saves it, unmerged. docs/real-models.md has the server's command.

Every version of an adapter has a new name and a new folder, with a word of the run in it. Traps:
    the server does not read an adapter again whose name it knows
    its cache of prompts goes by names, so under an old name the old adapter's keys would answer
    a server that was not stopped still knows the adapters of an earlier run
    `load_inplace` would read the folder again at every token
"""

import atexit
import math
import re
import shutil
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from common.core.batch import Batch
from common.core.errors import UserError
from common.core.model import tokenize

import requests
import torch
from filelock import FileLock
from peft.tuners.lora import LoraLayer
from transformers import TrainerCallback

TIMEOUT = 10, 3600
"""Seconds to connect, and for an answer, which waits for the answers that were asked for before."""
LARGEST_GAP = 0.2
"""Nats a token. Between bfloat16 here and bfloat16 there, the gap is about a tenth of this."""
FEWEST = 32
"""The gap is a mean over at least as many tokens."""
AT_ONCE = 256
"""Largest number of requests under way; a request is for a row."""
WHOLE_VOCABULARY = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
"""Without these settings the model's generation_config would count, and scoring does not know it.
"""
MALFORMED = LookupError, ValueError, TypeError, AttributeError, RecursionError
"""Errors of reading an answer that is not JSON or has another form."""


def find_base(url: str) -> tuple[str, int]:
    """Returns the name under which the server has its base, and the tokens of its longest text.

    Raises:
        UserError: there is no vLLM server at this address.
    """
    try:
        models = requests.get(f"{url}/v1/models", timeout=10).json()["data"]
        (name, longest), *_ = [(m["id"], m["max_model_len"]) for m in models if not m.get("parent")]
        return name, int(longest)
    except requests.ConnectionError:
        raise UserError(f"--rollouts {url}: nobody listens there; start it first.") from None
    except (requests.RequestException, *MALFORMED):
        raise UserError(f"--rollouts {url}: this is not a vLLM server.") from None


class Server(TrainerCallback):
    """A server whose `generate` takes the place of common/core/plain.py's. As a callback of the
    trainer it looks at the gap after every update.
    """

    def __init__(self, url: str, folder: str, word: str):
        """
        Args:
            url: the server's address.
            folder: the run's folder, in which adapters are published; the server must see the same
                path.
            word: the same on all processes of a run, and different in every run.
        """
        self.url, self.word = url, word
        self.base, self.longest = find_base(url)
        self.folder = Path(folder).resolve() / ".rollouts"
        atexit.register(self.forget)

    def error(self, sentence: str) -> UserError:
        return UserError(f"--rollouts {self.url}: {sentence}.")

    # ------------------------------------------------------------------ before a run
    def check(self, trainer):
        """Publishes every adapter, and lets every player write a few tokens. Their log-probs must
        be those that the trainer computes.

        Raises:
            UserError: the server cannot load the adapters, has another base, or allows only shorter
                texts.
        """
        base, tokenizer = trainer.model.get_base_model(), trainer.processing_class
        prompts = tokenize([[{"role": "user", "content": "2+3"}]], tokenizer)
        for name, player in trainer.players.items():
            self.check_length(player.reads + player.max_tokens + 1)
            with trainer.playing(name):
                asked = (trainer.model, prompts, FEWEST, player.temperature, trainer.eos_token_ids)
                ids, logps = self.generate(*asked, keys=[0])
            batch = Batch.of(name, prompts, ids, tokenizer.pad_token_id, base.device)
            found = trainer.log_probs(name, batch).cpu()  # (1, T)
            gap = (found - torch.tensor(logps)).abs().mean().item()
            if not gap <= LARGEST_GAP:  # not a number, either
                raise self.error(
                    f"its log-probs of what the {name} writes are {gap:.2f} nats a token from "
                    f"those of --model {trainer.cfg.model}: it has another base or number format, "
                    f"or, at a temperature of {player.temperature:g}, was started without "
                    f"--logprobs-mode processed_logprobs"
                )

    def on_log(self, args, state, control, logs=None, **_):
        """Does after every update what `check` does before the run: the server may be restarted
        with another base, or answer from another adapter than it was given.

        Raises:
            UserError: the log-probs of what an update trains on are too far from ours.
        """
        gap = (logs or {}).get("co/sampler_gap", 0.0)
        if not gap <= LARGEST_GAP:  # not a number, either
            raise self.error(
                f"its log-probs are now {gap:.2f} nats a token from ours, and were not when the "
                f"run began: it answers from another base or another adapter than it should; stop "
                f"it, and start it again as docs/real-models.md says"
            )

    def check_length(self, tokens: int):
        if tokens > self.longest:
            raise self.error(
                f"a prompt with its completion may have {tokens} tokens, and the server was "
                f"started with --max-model-len {self.longest}"
            )

    # ------------------------------------------------------------------ asking
    def generate(self, model, prompt_ids, max_tokens: int, temperature: float, eos_ids, keys):
        """Returns the token ids of each row, and the log-prob of each token; see `plain.generate`.

        Each row is a request of its own, whose seed is the row's key. If rows share a prompt, the
        server's cache reads it once. The server draws with random numbers of its own, and its
        logits depend on what else it computes; so the same seed need not give the same texts again.

        Raises:
            UserError: the server refuses, does not answer, or answers with something else.
        """
        self.check_length(max(map(len, prompt_ids)) + max_tokens)
        folder = self.publish(model)
        body = {"model": folder.name if folder else self.base, "max_tokens": max_tokens}
        body |= {"temperature": temperature, "stop_token_ids": list(eos_ids), "ignore_eos": True}
        body |= {"logprobs": 0, "return_token_ids": True, **WHOLE_VOCABULARY}
        vocabulary = model.get_base_model().config.get_text_config().vocab_size

        def ask(prompt: list[int], key: int) -> tuple[list[int], list[float]]:
            asked = body | {"prompt": prompt, "seed": key & (1 << 48) - 1}
            answer = self.post("/v1/completions", asked)
            if not answer.ok:
                raise self.error(f"it refuses a request: {message(answer)}")
            with suppress(*MALFORMED):
                ids, logps = read_completion(answer.json(), max_tokens, {*eos_ids})
                if all(type(i) is int and 0 <= i < vocabulary for i in ids):
                    return ids, logps
            raise self.error(
                f"this is no completion of up to {max_tokens} tokens of --model, each with its "
                f"log-prob: {message(answer)}; take a newer vLLM, and start it as "
                f"docs/real-models.md says"
            )

        with ThreadPoolExecutor(min(AT_ONCE, len(keys))) as pool:
            found = [*pool.map(ask, prompt_ids, keys)]
        if temperature:
            self.check_seeds(prompt_ids, found)
        return [ids for ids, _ in found], [logps for _, logps in found]

    def check_seeds(self, prompt_ids: list[list[int]], found: list[tuple[list, list]]):
        """Raises UserError if too many rows of a prompt have the same text: a server that takes no
        notice of seeds may write a single text for all of them.
        """
        prompts = [tuple(ids) for ids in prompt_ids]
        texts = [(prompt, tuple(ids)) for prompt, (ids, _) in zip(prompts, found)]
        of_prompt, of_text = Counter(prompts), Counter(texts)
        for prompt, text, (_, logps) in zip(prompts, texts, found):
            count, same = of_prompt[prompt], of_text[text] - 1
            # P(`same` others of the n - 1 are also this text) <= C(n - 1, same) p^same
            if math.log(math.comb(count - 1, same)) + same * sum(logps) < -30:  # one in 10^13
                raise self.error(
                    f"{same + 1} of {count} completions of a prompt are the same text, which "
                    f"nobody draws so often by chance: it takes no notice of seeds; take a newer "
                    f"vLLM"
                )

    def post(self, path: str, body: dict) -> requests.Response:
        """Returns the answer, whatever its status. Every request has a connection of its own,
        because vLLM closes the idle ones after a few seconds.
        """
        try:
            return requests.post(self.url + path, json=body, timeout=TIMEOUT)
        except requests.RequestException as error:
            kind = type(error).__name__
            raise self.error(f"no answer to {path} ({kind}); start the server again") from None

    # ------------------------------------------------------------------ publishing
    def publish(self, model) -> Path | None:
        """Returns the folder of the adapter that plays, as it is now, whose name is the server's;
        None if the base plays. Of several processes the first to ask publishes for all, because
        their weights are equal. The name holds a checksum of the weights.
        """
        layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
        if layers[0].disable_adapters:
            return None
        adapter, checksum = model.active_adapter, 0
        for layer in layers:
            for part in (layer.lora_A, layer.lora_B):
                checksum = zlib.crc32(part[adapter].weight.detach().cpu().numpy(), checksum)
        folder = self.folder / adapter / f"{adapter}-{checksum:08x}-{self.word}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):
            if not folder.exists():
                new = self.folder / ".new"  # whole, and then renamed
                model.save_pretrained(new, selected_adapters=[adapter], save_embedding_layers=False)
                (new / adapter).rename(folder)
                shutil.rmtree(new)
                self.load(folder)
                for old in {*folder.parent.iterdir()} - {folder}:
                    self.post("/v1/unload_lora_adapter", {"lora_name": old.name})
                    shutil.rmtree(old)
        return folder

    def load(self, folder: Path):
        body = {"lora_name": folder.name, "lora_path": str(folder)}
        answer = self.post("/v1/load_lora_adapter", body)
        if not answer.ok and "already been loaded" not in answer.text:
            helps = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
            reason = helps if '"detail"' in answer.text else message(answer)  # no such path
            raise self.error(f"it cannot load the adapter in {folder}: {reason}")

    def forget(self):
        """Removes this run's adapters from the server, at the end."""
        for folder in self.folder.glob("*/*"):
            with suppress(requests.RequestException):
                body = {"lora_name": folder.name}
                requests.post(f"{self.url}/v1/unload_lora_adapter", json=body, timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


def read_completion(answer: dict, limit: int, ends: set) -> tuple[list[int], list[float]]:
    """Returns the token ids of the one completion in vLLM's answer, and the log-prob of each.

    Raises:
        MALFORMED: the completion is not whole, or its log-probs are not usable.
    """
    [choice] = answer["choices"]
    ids, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if choice["finish_reason"] == "stop":
        whole = ids[-1] in ends and len(ids) <= limit
    else:
        whole = choice["finish_reason"] == "length" and len(ids) == limit
    if not whole or not ends.isdisjoint(ids[:-1]) or len(logps) != len(ids):
        raise ValueError
    if not all(-1e4 < logp < 1e-3 for logp in logps):  # not a number, either
        raise ValueError
    return ids, logps


def message(answer: requests.Response) -> str:
    """Returns what a server says of an error, in one line."""
    found = re.search(r'"message": ?"((?:[^"\\]|\\.)*)', answer.text)
    return " ".join((found[1] if found else answer.text).split())[:300].rstrip(".")
