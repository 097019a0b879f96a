"""Questions of our own, as many as a bench wants, all different, through the model's template."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from gateway.tokenizer import ModelTokenizer

TOPICS = (
    *("lighthouses", "bees and their hive", "the tides", "sourdough bread", "old maps"),
    *("night trains", "volcanoes", "chess openings", "the water cycle", "violins"),
    *("glaciers", "public libraries", "compost", "sundials", "wind turbines", "coral reefs"),
)
FORMS = (
    "Explain {} to a child of ten.",
    "Write a short letter to a friend about {}, and ask two questions at its end.",
    "List five facts about {}, one a line, and say which of them is the strangest.",
    "Write the first page of a story that has to do with {}. It begins on a rainy morning.",
    "A reader claims that nobody needs to know anything about {}. Answer politely, in three parts: "
    "where the reader is right, where not, and what one could read first.",
    "Make a plan for a lesson of one hour about {}: what comes first, what the pupils do "
    "themselves, what they write down, and how the teacher finds out whether it was understood.",
    "Compare {} then and now.",
)


def questions() -> Iterator[str]:
    """All of them, then all of them again; neighbours differ in both, topic and form."""
    for i in itertools.count():
        # 16 topics and 7 forms have no common divisor: 112 different ones.
        yield FORMS[i % len(FORMS)].format(TOPICS[i % len(TOPICS)])


def prompts(folder: Path) -> Iterator[list[int]]:
    """The ids of each, with the chat template of the model in that folder."""
    tokenizer = ModelTokenizer.load(folder)
    for question in questions():
        yield tokenizer.encode_chat([("user", question)])
