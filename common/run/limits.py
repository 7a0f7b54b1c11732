"""How much of the machine this process may use. A container or a batch system gives it some of the
cores (its affinity), or a part of their time and of the memory (Linux's control groups).
"""

import math
import os
from contextlib import suppress
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """Returns the number of cores that this process may use, rounded up."""
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))  # not Linux
    found = [len(affinity(0))]
    # version 2 has both numbers in one file, version 1 in two; microseconds
    groups = numbers("cpu", "cpu.max") + numbers("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    for quota, period in groups:
        if quota > 0:  # version 1 says -1 for no limit
            found.append(math.ceil(quota / period))
    return min(found)


def memory() -> int:
    """Returns the bytes of memory that this process may use, whether they are in use or not."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = numbers("memory", "memory.max") + numbers("memory", "memory.limit_in_bytes")
    return min([machine, *(limit for (limit,) in groups)])


def numbers(controller: str, *files: str) -> list[list[int]]:
    """Returns the numbers in these files of each control group that this process is in. A group is
    inside of others, and their limits hold for it, too. A group without a limit has "max" in place
    of a number, or no such file, and is left out.
    """
    found = []
    for line in OWN.read_text().splitlines() if OWN.exists() else ():
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        if controllers and controller not in controllers.split(","):
            continue
        top, parts = GROUPS / (controller if controllers else ""), Path(path.strip("/")).parts
        for n in range(len(parts) + 1):
            folder = top.joinpath(*parts[:n])
            with suppress(OSError, ValueError):
                texts = [(folder / file).read_text() for file in files]
                found.append([int(word) for text in texts for word in text.split()])
    return found
