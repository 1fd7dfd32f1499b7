"""The first line of an error from elsewhere, to be quoted in one of ours."""


def first_line(error: BaseException) -> str:
    r"""The first line of what an error says; its kind where it says nothing.

    Example:
        >>> first_line(ValueError("\n  no such layer\nsee below")), first_line(KeyError())
        ('no such layer', 'KeyError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]
