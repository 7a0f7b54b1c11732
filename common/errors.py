"""`UserError`: something the user can put right."""


class UserError(Exception):
    """Scripts print its sentence and end with exit code 2, without a stack trace."""
