"""What a user reads: a run's own lines, and the two errors that end in a sentence instead of a
stack trace, which `run.plain_errors` shows.
"""

import os
import sys

NOBODY = open(os.devnull, "w")  # noqa: SIM115  who listens when a pipe behind stdout is closed


def say(text: str):
    """A line of the run's own, by the main process."""
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
