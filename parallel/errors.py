"""The one error class meant for people. Imports no torch."""


class UserError(Exception):
    """Something the user asked for cannot be done; the text says what, where and what to write instead.

    train.py prints the text without a traceback and exits with code 2.
    """
