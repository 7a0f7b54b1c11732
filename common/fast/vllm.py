"""Rollouts by a vLLM server that the user has started (`--rollouts URL`), in place of our sampler.

The server holds the base. Who plays is published to it as PEFT saves an adapter, unmerged, when it
is first asked after it has changed; docs/scale.md has the server's command.

Every version of an adapter has a new name and a new folder, and a word of the run in its name.
Traps: a name that the server knows is not read again; its cache of prompts goes by names, so that a
name used twice would be answered from the old adapter's keys; a server that has not been stopped
still knows those of an earlier run; and `load_inplace` reads the folder again at every token.
"""

import atexit
import itertools
import math
import shutil
import threading
import time
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from common.batch import Batch
from common.errors import UserError, say
from common.plain import tokenize

import requests
import torch
from filelock import FileLock
from peft.tuners.lora import LoraLayer

RESTART = 600
"""Seconds for which a server that does not listen any more is waited for."""
PATIENCE, SLOWEST = 300, 10
"""A request may take so many seconds, and one more for every SLOWEST tokens that are asked for."""
LARGEST_GAP = 0.2
"""Nats a token. Between bfloat16 here and there it is a tenth of that."""
AT_ONCE = 256
"""Requests under way, each of one prompt, for all rows that share it."""
WHOLE_VOCABULARY = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
"""Else what the model's generation_config says would come in, and scoring knows nothing of it."""


def find_base(url: str) -> tuple[str, int]:
    """(the name under which the server has its base, tokens of its longest text).

    Raises:
        UserError: there is no vLLM server at this address.
    """
    try:
        answer = requests.get(f"{url}/v1/models", timeout=10)
        (base, *_) = [model for model in answer.json()["data"] if not model.get("parent")]
        return base["id"], base["max_model_len"]
    except requests.ConnectionError:
        raise UserError(f"--rollouts {url}: nobody listens there; start it first.") from None
    except (requests.RequestException, KeyError, ValueError, TypeError, AttributeError):
        raise UserError(f"--rollouts {url}: this is not a vLLM server.") from None


class Server:
    """`complete` is that of common/plain.py, with the log-prob of each token besides."""

    def __init__(self, url: str, folder: str, word: str):
        """
        Args:
            folder: the run's, in which adapters are published; the server must see it, too.
            word: the same in all processes of the run, another one in every run.
        """
        self.url, self.word, self.waiting = url, word, threading.Lock()
        self.base, self.longest = find_base(url)
        self.folder = Path(folder).resolve() / ".rollouts"
        self.session = requests.Session()
        self.session.mount("http", requests.adapters.HTTPAdapter(pool_maxsize=AT_ONCE))
        atexit.register(self.forget)

    # ------------------------------------------------------------------ asking
    def post(self, path: str, body: dict, tokens: int = 0) -> requests.Response:
        """The server's answer, whatever its status. One that has gone is waited for."""
        seconds = PATIENCE + tokens / SLOWEST
        for _ in range(3):
            try:
                return self.session.post(self.url + path, json=body, timeout=(10, seconds))
            except requests.ReadTimeout:
                raise self.error(f"no answer to {path} within {seconds:.0f} seconds") from None
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                self.wait()
        raise self.error(f"breaks off {path} again and again")

    def wait(self):
        """Until the server is back. One thread does so for all."""
        with self.waiting:
            for second in range(RESTART):
                with suppress(UserError):
                    self.base, self.longest = find_base(self.url)
                    return
                if second == 0:
                    say(f"--rollouts {self.url}: the server has gone; waiting until it is back")
                time.sleep(1)
        raise self.error(f"has been gone for {RESTART} seconds")

    def error(self, sentence: str) -> UserError:
        return UserError(f"--rollouts {self.url}: {sentence}.")

    def complete(self, model, prompt_ids, max_tokens: int, temperature: float, eos_ids):
        """(token ids of each row, the log-prob of each token there); see `plain.complete`.

        Random seeds come from torch, whose random numbers a checkpoint keeps. Rows that share a
        prompt are one request: vLLM adds a row's number to its seed.
        """
        self.check_length(max(map(len, prompt_ids)) + max_tokens)
        folder, rows = self.publish(model), defaultdict(list)
        for place, ids in enumerate(prompt_ids):
            rows[tuple(ids)].append(place)
        seeds = torch.randint(1 << 48, (len(rows),)).tolist()
        body = {"model": folder.name if folder else self.base, "max_tokens": max_tokens}
        body |= {"temperature": temperature, "stop_token_ids": list(eos_ids), "ignore_eos": True}
        body |= {"logprobs": 0, "return_token_ids": True, **WHOLE_VOCABULARY}

        def ask(prompt: tuple, places: list, seed: int) -> list[dict]:
            count = len(places) if temperature else 1  # greedy, they are equal
            asked = body | {"prompt": list(prompt), "n": count, "seed": seed}
            path, tokens = "/v1/completions", len(prompt_ids) * max_tokens
            answer = self.post(path, asked, tokens)
            if answer.status_code == 404 and folder:  # it has been restarted
                self.load(folder)
                answer = self.post(path, asked, tokens)
            if not answer.ok:
                raise self.error(f"it refuses a request: {message(answer)}")
            return sorted(answer.json()["choices"], key=lambda choice: choice["index"])

        found = [None] * len(prompt_ids)
        with ThreadPoolExecutor(min(AT_ONCE, len(rows))) as pool:
            answers = pool.map(ask, rows, rows.values(), seeds)
            for places, choices in zip(rows.values(), answers):
                for place, choice in zip(places, itertools.cycle(choices)):
                    found[place] = self.read(choice, eos_ids)
        return [ids for ids, _ in found], [logps for _, logps in found]

    def check_length(self, tokens: int):
        if tokens > self.longest:
            raise self.error(
                f"a prompt with its completion may have {tokens} tokens, and the server was "
                f"started with --max-model-len {self.longest}"
            )

    def check(self, trainer):
        """Before a run: publishes every adapter, and lets every player write a few tokens, whose
        log-probs are to be those of the trainer.

        Raises:
            UserError: the server cannot load them, has another base, or shorter texts.
        """
        base, pad_id = trainer.model.get_base_model(), trainer.processing_class.pad_token_id
        for name, player in trainer.players.items():
            self.check_length(player.reads + player.max_tokens + 1)
            prompts = tokenize([[{"role": "user", "content": "2+3"}]], trainer.processing_class)
            with trainer.playing(name):
                asked = (trainer.model, prompts, 32, player.temperature, trainer.eos_token_ids)
                ids, logps = self.complete(*asked)
            gap = math.inf
            if max(ids[0]) < base.config.get_text_config().vocab_size:
                batch = Batch.of(name, prompts, ids, pad_id, base.device)
                found = trainer.log_probs(name, batch).cpu()  # (1, T)
                gap = (found - torch.tensor(logps)).abs().mean().item()
            if gap > LARGEST_GAP:
                raise self.error(
                    f"its log-probs of what the {name} writes are {gap:.2f} nats a token from "
                    f"those of --model {trainer.cfg.model}: it has another base, or another number "
                    f"format, or, at a temperature of {player.temperature}, was started without "
                    f"--logprobs-mode processed_logprobs"
                )

    def read(self, choice: dict, eos_ids) -> tuple[list[int], list[float]]:
        """Token ids and log-probs of one completion, with its end token."""
        ids, logps = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        ended = choice.get("finish_reason") == "stop"
        if not ids or len(ids) != len(logps or ()) or ended != (ids[-1] in eos_ids):
            raise self.error("it leaves out tokens or log-probs; is it vLLM 0.11 or newer?")
        return ids, logps

    # ------------------------------------------------------------------ publishing
    def publish(self, model) -> Path | None:
        """The folder, and its name the server's, of the adapter that plays, as it is now; None
        where the base plays. Of several processes the first one to ask publishes for all: they have
        equal weights, of which the name holds a checksum.
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
                new = self.folder / ".new"  # written whole and renamed
                model.save_pretrained(new, selected_adapters=[adapter], save_embedding_layers=False)
                (new / adapter).rename(folder)
                shutil.rmtree(new)
                self.load(folder)
                for old in set(folder.parent.iterdir()) - {folder}:
                    self.post("/v1/unload_lora_adapter", {"lora_name": old.name})
                    shutil.rmtree(old)
        return folder

    def load(self, folder: Path):
        body = {"lora_name": folder.name, "lora_path": str(folder)}
        answer = self.post("/v1/load_lora_adapter", body)
        if answer.ok or "already been loaded" in answer.text:
            return
        if '"detail"' in answer.text:  # there is no such path
            raise self.error(
                "it may not load adapters; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        raise self.error(f"it cannot load the adapter in {folder}: {message(answer)}")

    def forget(self):
        """At the end: the server knows nothing of this run any more."""
        for folder in self.folder.glob("*/*"):
            with suppress(requests.RequestException):
                body = {"lora_name": folder.name}
                requests.post(f"{self.url}/v1/unload_lora_adapter", json=body, timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


def message(answer: requests.Response) -> str:
    """What a server says about an error, in one line."""
    try:
        said = answer.json()
        said = (said.get("error") or said).get("message") or answer.text
    except (ValueError, AttributeError):
        said = answer.text
    return " ".join(str(said).split())[:300].rstrip(".")
