"""The n-gram drafter over a real stream, end to end."""

from __future__ import annotations

from outrider.serving.settings import DraftSettings
from tests.support.draft_stream import Follower, make_open, open_stream, run_draft_service


async def test_it_proposes_what_followed_last_time() -> None:
    """A repeated suffix is continued as it was before, up to the window."""
    async with run_draft_service(DraftSettings(port=0)) as draft, open_stream(draft.address) as s:
        follower = Follower(s, 1, make_open(prompt_len=7))
        await follower.open([5, 6, 7, 8, 9, 5, 6], window=4)
        assert await follower.collect(4) == [7, 8, 9, 5]
        await follower.confirm([7, 8, 3])
        assert await follower.collect(1) == []
        assert follower.dry
        await follower.confirm([9])
        assert await follower.collect(4) == [5, 6, 7, 8]
