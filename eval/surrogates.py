"""Halves of letters: JSON can name them one by one, and no file can hold them."""


def writable(text: str) -> str:
    """The text with both halves of each letter joined, and U+FFFD for a half without its other one."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def check_whole(text: str) -> None:
    """Refuse a text that holds half a letter.

    Raises:
        ValueError: If it does; the text says where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text must hold whole letters, got half of one at {error.start}") from None
