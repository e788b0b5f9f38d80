"""The one exception people meet: something they gave cannot be used, or would break the privacy guarantee."""


class InputError(ValueError):
    """Says which field is wrong, what its value was, and what to do about it. The command line exits with 2."""
