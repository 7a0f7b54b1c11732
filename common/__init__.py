"""What the six scripts share. See common/cotrainer.py first."""

import logging
import os
import warnings

# Notices of libraries that a user can do nothing about would bury the run's own lines. Set here, because some come at
# import; scripts import `common` before the libraries.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
warnings.filterwarnings("ignore", message=".*pin_memory.*")
for _name in ("bitsandbytes", "math_verify", "torch.distributed.elastic.multiprocessing.redirects"):
    logging.getLogger(_name).setLevel(logging.ERROR)
