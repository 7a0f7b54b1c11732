"""What a user reads: a run's own lines, and two errors that end in a sentence instead of a stack
trace. `exit_with_one_sentence` (common/run/session.py) shows that sentence.
"""

import os
import re
import sys

NOBODY = open(os.devnull, "w")  # noqa: SIM115  takes the place of stdout when its pipe is closed
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Returns the text with control characters spelt out, such as `\\u001b`. They move a cursor,
    clear a screen or reverse the order of other characters, and a model or a server may have
    written them.
    """
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(text: str):
    """Prints a line of the run; only the main process prints."""
    text = visible(text)
    if os.environ.get("RANK", "0") == "0":  # accelerate knows it too, but would import torch
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `| head` has seen enough; the run goes on silently
            sys.stdout = NOBODY
        except UnicodeEncodeError:  # a model may write what a terminal cannot show
            print(text.encode("ascii", "backslashreplace").decode(), flush=True)


class UserError(Exception):
    """The user can put this right: an argument, a file, the machine."""


class ScriptError(ValueError):
    """A mistake in a script, such as advantages of the wrong shape. The user reads it with the line
    of the script that made it.
    """
