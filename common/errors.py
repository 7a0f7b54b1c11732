"""The two errors that end in a sentence instead of a stack trace; `run.plain_errors` shows them."""


class UserError(Exception):
    """Something that the user can put right: an argument, a file, the machine."""


class ScriptError(ValueError):
    """A mistake in a script, such as advantages of the wrong shape. It is shown with the line of
    the script that made it.
    """
