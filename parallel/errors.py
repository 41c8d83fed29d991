"""The one error class for mistakes of the user. Imports no torch."""


class UserError(Exception):
    """What the user asked for is not possible. The message says what, where, and what to write instead.

    train.py prints the text without a traceback and exits with code 2.
    """
