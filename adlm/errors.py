"""What the user did wrong, apart from what we did wrong. Knows nothing else."""


class UserError(ValueError):
    """A mistake in what was given to us; the message is one sentence: the knob, its value, the remedy.

    The command line prints it and exits with code 2; anything else that escapes is our bug and keeps its traceback.
    """
