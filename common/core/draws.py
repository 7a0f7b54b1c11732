"""Which token is drawn: each token has a uniform number of its own, which is a hash and needs no
generator with a state.

With a generator that has a state, a text would depend on how many rows the process has sampled
before it. That number depends on the number of processes, and on a GPU on its free memory. Here the
number is a hash of what the token is for: seed, step, player, call, row and place in the
completion. So a seed means the same texts, however the work is divided and wherever a run resumes.
Only the rounding of the logits can change a text.

Shapes: b rows that are sampled together.
"""

import hashlib

import torch

CONSTANTS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GAMMA, M1, M2 = (n - (1 << 64) for n in CONSTANTS)  # as signed integers


def row_key(*words) -> int:
    """Returns a hash of all these numbers and texts: 64 bits, as a signed integer."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform(keys: torch.Tensor, place) -> torch.Tensor:
    """Returns uniform numbers in (0, 1], (b,) float64, which are independent between keys and
    between places. They are SplitMix64's, with the row's key as its seed (Steele, Lea and Flood,
    2014, fig. 16):

        u = mix(key + (place + 1) * GAMMA)

    int64 arithmetic wraps around on a CPU and on a GPU alike, and a CUDA graph can hold it.

    Args:
        keys: (b,) int64, from `row_key`.
        place: the token's place in the completion, counted from 0; a number, or a tensor that a
            CUDA graph reads anew each time.
    """
    z = keys + (torch.as_tensor(place, device=keys.device) + 1) * GAMMA
    z = (z ^ _shifted(z, 30)) * M1
    z = (z ^ _shifted(z, 27)) * M2
    z = z ^ _shifted(z, 31)
    return (_shifted(z, 11) + 1).double() * 2.0**-53  # 53 bits, as many as a float64 has


def _shifted(z: torch.Tensor, n: int) -> torch.Tensor:
    # >> of a signed integer copies the sign into the upper bits, which must be 0
    return (z >> n) & ((1 << (64 - n)) - 1)
