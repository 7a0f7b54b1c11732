"""This folder computes the same numbers as common/core/plain.py, sooner. A reader can follow a step
without it.

With `--plain` a run calls nothing of this folder, and tests/common/test_plain.py compares the two.
A run uses vllm.py only with `--rollouts`.
"""

from common.fast.layers import replace_layers
from common.fast.sampling import generate  # noqa: F401
from common.fast.scoring import in_order, token_logps, use_packed_attention  # noqa: F401


def install(model, gpu: bool):
    """Gives a PeftModel faster layers, and transformers the attention of packed rows."""
    replace_layers(model, gpu)
    use_packed_attention()
