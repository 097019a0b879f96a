"""What is text at all, and what of it can stand on a line for people.

Names and messages come from peers, who may have put control characters in them: those would steer
the terminal of whoever reads the log, or make one line look like two.
"""

from __future__ import annotations

import unicodedata


def is_text(text: str) -> bool:
    """False if it came from bytes that are no UTF-8, which Python keeps as lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def one_line(text: str) -> str:
    """The text with everything escaped that would end the line or that is not to be seen."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def for_terminal(text: str) -> str:
    """The text with every control character escaped but those that only set it out."""
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) == "Cc" and char not in "\n\t"
        else char
        for char in text
    )


def one_word(value: object) -> str:
    """A value behind its key: as it is, or as Python writes it where it could look like more."""
    if isinstance(value, str) and value.isprintable() and not set(value) & set(" ='\""):
        return value
    return repr(value)


def indented(lines: str) -> str:
    """A traceback, say, whose lines none can take for those of a log."""
    return "\n".join(f"  {one_line(line)}" for line in lines.split("\n"))


def counted(number: int, noun: str) -> str:
    """1 round, 2 rounds; for nouns that take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
