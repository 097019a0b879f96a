"""Stop strings in streamed text, against a reference that sees the whole text at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import StopMatcher


def reference(
    text: str, stops: Sequence[str], include_stop: bool = False, exempt: int = 0
) -> tuple[str, str | None]:
    """The text up to the match that begins first, the shortest of those, and that stop."""
    for start in range(len(text)):
        for stop in sorted(stops, key=len):
            if text.startswith(stop, start) and start + len(stop) > exempt:
                return text[: start + len(stop) * include_stop], stop
    return text, None


def run(
    chunks: Sequence[str], stops: Sequence[str], include_stop: bool = False, num_exempt: int = 0
) -> tuple[str, str | None]:
    """Feed the chunks, of which the first `num_exempt` do not count, checking what is held."""
    matcher = StopMatcher(stops, include_stop)
    longest = max(map(len, stops), default=1)
    given_out = ""
    for index, chunk in enumerate(chunks):
        scan = matcher.feed(chunk, counts=index >= num_exempt)
        given_out += scan.text
        if scan.matched is not None:
            return given_out, scan.matched
        so_far = "".join(chunks[: index + 1])
        assert so_far.startswith(given_out)
        held = so_far[len(given_out) :]
        assert len(held) <= longest - 1
        assert not held or any(
            stop.startswith(held) and stop != held or num_exempt for stop in stops
        )
    scan = matcher.finish()
    return given_out + scan.text, scan.matched


@pytest.mark.parametrize("include_stop", [False, True])
def test_all_short_texts_and_stops(include_stop: bool) -> None:
    """Every text of up to 6 letters with every pair of stops of up to 3, letter by letter."""
    words = ["".join(w) for n in (1, 2, 3) for w in itertools.product("ab", repeat=n)]
    texts = ["".join(t) for n in range(7) for t in itertools.product("ab", repeat=n)]
    for stops in itertools.combinations(words, 2):
        for text in texts:
            assert run(text, stops, include_stop) == reference(text, stops, include_stop)


@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), max_size=4),
    cuts=st.lists(st.integers(0, 20), max_size=8),
    include_stop=st.booleans(),
)
def test_chunks_do_not_matter(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    """The result depends on the whole text only, not on where it was cut."""
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert run(chunks, stops, include_stop) == reference(text, stops, include_stop)


@given(
    early=st.text("ab", max_size=8),
    late=st.text("ab", max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stops_that_end_too_early_do_not_count(early: str, late: str, stops: list[str]) -> None:
    """A stop completed by text that does not count is passed over; one that ends later is not."""
    chunks = [*early, *late]
    expected = reference(early + late, stops, exempt=len(early))
    assert run(chunks, stops, num_exempt=len(early)) == expected


def test_a_stop_is_found_at_its_last_character() -> None:
    """Nothing more has to be generated once a stop is complete."""
    matcher = StopMatcher(["END"])
    assert matcher.feed("the E").text == "the "
    assert matcher.feed("N").text == ""
    scan = matcher.feed("D")
    assert (scan.text, scan.matched) == ("", "END")


def test_a_near_miss_gives_everything_back_at_once() -> None:
    """Held text comes with the character that breaks the match."""
    matcher = StopMatcher(["ENDING"])
    assert [matcher.feed(char).text for char in "ENDIN"] == [""] * 5
    assert matcher.feed("!").text == "ENDIN!"
    assert matcher.finish().text == ""


def test_a_shorter_stop_inside_a_longer_one_counts_when_the_longer_fails() -> None:
    """`b` lies inside `abc`: it decides once `abc` cannot come any more, and at the end."""
    assert run("xabd", ["abc", "b"]) == ("xa", "b")
    assert run("xab", ["abc", "b"]) == ("xa", "b")
    assert run("xabc", ["abc", "b"]) == ("x", "abc")


def test_without_stops_text_passes_through() -> None:
    """Nothing is held when there is nothing to find."""
    matcher = StopMatcher([])
    assert matcher.feed("abc").text == "abc"
    assert matcher.finish().text == ""
