"""The one exception that carries a sentence for the user."""


class BadInput(ValueError):
    """Something the user gave cannot be used. The message is one sentence: the value, and what would be right.

    The command line prints it without a traceback and exits with status 2.
    """
