"""What a user reads: a run's own lines, and the two errors that end in a sentence instead of a
stack trace, which `exit_with_one_sentence` (common/run/session.py) shows.
"""

import os
import re
import sys

NOBODY = open(os.devnull, "w")  # noqa: SIM115  who listens when a pipe behind stdout is closed
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Characters that move a cursor, clear a screen or turn the order of others, as `\\u001b`: a
    model or a server may have written them.
    """
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(text: str):
    """A line of the run's own, by the main process."""
    text = visible(text)
    if os.environ.get("RANK", "0") == "0":  # as accelerate has it, which imports torch
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `| head` has seen enough: as Ctrl-C, see Run.on_step_end
            sys.stdout = NOBODY
        except UnicodeEncodeError:  # a model may write what a terminal cannot show
            print(text.encode("ascii", "backslashreplace").decode(), flush=True)


class UserError(Exception):
    """Something that the user can put right: an argument, a file, the machine."""


class ScriptError(ValueError):
    """A mistake in a script, such as advantages of the wrong shape. It is shown with the line of
    the script that made it.
    """
