"""Attention of one new token in each row on a CPU: python benchmarks/attention.py

SmolLM2's nine heads of queries and three of keys, 64 rows of 320 tokens in a cache of 400, every
second one padded. Ours takes the query heads that share keys as queries of one head; transformers'
is what it does under the switch SHARED_KEYS of common/run/models.py, which updates need. See
side_by_side.py for what is written.
"""

import os
from types import SimpleNamespace

from side_by_side import arguments, keep, with_memory  # isort: skip
from common.fast.scoring import attention
from common.run.models import SHARED_KEYS

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def main():
    args = arguments(__doc__, repeats=100).parse_args()
    torch.set_num_threads(args.threads)
    os.environ[SHARED_KEYS] = "1"
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        query = torch.randn(64, 1, 9, 64, dtype=dtype).transpose(1, 2)
        key, value = (torch.randn(64, 3, 400, 64, dtype=dtype)[:, :, :320] for _ in range(2))
        mask = torch.zeros(64, 1, 1, 400, dtype=dtype)[..., :320]
        mask[::2, ..., :20] = -torch.inf
        given = module, query, key, value, mask
        methods = {
            "transformers'": lambda given=given: sdpa_attention_forward(*given)[0],
            "ours": lambda given=given: attention(*given)[0],
        }
        found, last = with_memory(methods, args.repeats)
        torch.testing.assert_close(last["ours"], last["transformers'"], rtol=0, atol=1e-2)
        about = f"{str(dtype).removeprefix('torch.')}, {args.threads} thread"
        about += "s" * (args.threads > 1)
        what = f"attention of one new token, 64 rows, 9 heads on 3 of keys, {about}"
        keep([{"what": what} | row for row in found], args.out)


if __name__ == "__main__":
    main()
