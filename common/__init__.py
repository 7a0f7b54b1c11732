"""What the scripts share. Read common/core/cotrainer.py first."""

import logging
import os
import sys
import warnings

# Notices of libraries that a user can do nothing about would bury the run's own lines. Some come at
# import, so they are silenced here, and scripts import `common` before the libraries.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# On a CPU large tensors in pages of 2 MB: to map and clear 14,000 small ones at each activation of
# a long batch takes longer than what is computed with it. torch reads this at its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
warnings.filterwarnings("ignore", message=".*pin_memory.*")
# trl.trainer.grpo_trainer prints a row at every step in which one has no reward; ours says it once
_multi = "torch.distributed.elastic.multiprocessing.redirects"
for _name in ("bitsandbytes", "math_verify", _multi, "trl.trainer.grpo_trainer"):
    logging.getLogger(_name).setLevel(logging.ERROR)

# Ctrl-C outside of training, while libraries are imported for example, which takes seconds. During
# training common/run/session.py handles it.
_usual = sys.excepthook
sys.excepthook = lambda kind, *rest: (
    print("interrupted", file=sys.stderr) if kind is KeyboardInterrupt else _usual(kind, *rest)
)
