"""The same numbers as common/plain.py, sooner; not needed to follow a step.

`--plain` uses nothing of this folder, and tests/common/test_plain.py compares the two. vllm.py is
used with `--rollouts` only.
"""

from common.fast.sampling import complete  # noqa: F401
from common.fast.scoring import in_order, in_parts, token_logps  # noqa: F401
