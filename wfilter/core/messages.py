"""Parts of messages: the first line of an error from elsewhere; the first few of many names."""

from collections.abc import Sequence


def first_line(error: BaseException) -> str:
    r"""The first line of what an error says; its kind where it says nothing.

    Example:
        >>> first_line(ValueError("\n  no such layer\nsee below")), first_line(KeyError())
        ('no such layer', 'KeyError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def first_few(names: Sequence[str], most: int) -> str:
    """The first names with commas, and how many more there are.

    Example:
        >>> first_few(["ant", "bee", "cow"], 2), first_few(["ant"], 2)
        ('ant, bee and 1 more', 'ant')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
