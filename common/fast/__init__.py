"""The same numbers as common/core/plain.py, sooner; not needed to follow a step.

`--plain` calls nothing of this folder, and tests/common/test_plain.py compares the two. vllm.py is
used with `--rollouts` only.
"""

from common.fast.layers import replace_layers
from common.fast.sampling import generate  # noqa: F401
from common.fast.scoring import in_order, token_logps, use_packed_attention  # noqa: F401


def install(model, gpu: bool):
    """Gives a PeftModel faster layers, and transformers the attention of packed rows."""
    replace_layers(model, gpu)
    use_packed_attention()
