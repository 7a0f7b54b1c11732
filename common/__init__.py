"""What the six scripts share. See common/cotrainer.py first."""

import logging
import os
import sys
import warnings

# Notices of libraries that a user can do nothing about would bury the run's own lines. Set here, because some come at
# import; scripts import `common` before the libraries.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
warnings.filterwarnings("ignore", message=".*pin_memory.*")
for _name in ("bitsandbytes", "math_verify", "torch.distributed.elastic.multiprocessing.redirects"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_usual = sys.excepthook
# Ctrl-C outside of training, which handles it itself: while libraries are imported, say, which takes seconds
sys.excepthook = lambda kind, *rest: print("interrupted", file=sys.stderr) if kind is KeyboardInterrupt else _usual(kind, *rest)
