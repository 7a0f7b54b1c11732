"""What benchmarks ask of the machine: seconds, memory, kernels; and `generate`, to compare with."""

import gc
import platform
import time

import torch

GPU = torch.cuda.is_available()


def machine() -> str:
    return torch.cuda.get_device_name() if GPU else f"{platform.machine()} CPU"


def tidy():
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def now() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def memory() -> dict[str, float]:
    """GiB at the highest point since `tidy`; nothing without a GPU."""
    if not GPU:
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": allocated / 2**30, "reserved": reserved / 2**30}


def kernels(work) -> int:
    """GPU kernels that `work()` starts; operators, where there is no GPU."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if GPU else kinds.CPU]) as profile:
        work()
        now()
    found = profile.events()
    if GPU:  # the profiler counts launches and copies, too
        cuda = torch.autograd.DeviceType.CUDA
        found = [e for e in found if e.device_type == cuda and not e.name.startswith("Mem")]
    return len(found)


def by_generate(model, tokenizer, prompts: list, tokens: int, **more):
    """What `generate` returns: sequences (B, P + T), and what `more` asks for."""
    ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
    inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(model.device)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 0}
    settings |= {"pad_token_id": tokenizer.pad_token_id, "return_dict_in_generate": True}
    with torch.no_grad():
        return model.generate(**inputs, **settings, **more)
