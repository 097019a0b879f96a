"""Shared beginnings on a real (tiny) model: less to compute, and the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.draft_scripts import Wrong
from tests.support.in_process import running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import answer_all, make_request, random_prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


async def test_a_repeated_prompt_is_not_computed_again(model: Path) -> None:
    """The second answer equals the first, and its full blocks came from the cache."""
    (prompt,) = random_prompts([70])
    async with running_target(model) as target:
        first = await target.answer(make_request(prompt, 20))
        second = await target.answer(make_request(prompt, 20))
        assert second.ids == first.ids
        assert first.finish.usage.cached_prompt_tokens == 0
        assert second.finish.usage.cached_prompt_tokens == 64
        assert (await target.status()).load.prefilled_tokens == 70 + 70 - 64
    async with running_target(model, prefix_cache=False) as target:
        again = [await target.answer(make_request(prompt, 20)) for _ in range(2)]
        assert [each.ids for each in again] == [first.ids] * 2
        assert again[1].finish.usage.cached_prompt_tokens == 0


async def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(model: Path) -> None:
    """Somebody has to produce the logits of the first answer token."""
    (prompt,) = random_prompts([64])
    async with running_target(model) as target:
        first = await target.answer(make_request(prompt, 5))
        second = await target.answer(make_request(prompt, 5))
        assert second.ids == first.ids
        assert second.finish.usage.cached_prompt_tokens == 48


async def test_salts_keep_tenants_apart(model: Path) -> None:
    """Another salt finds nothing, the same one does."""
    (prompt,) = random_prompts([70])
    async with running_target(model) as target:
        requests = [make_request(prompt, 5) for _ in range(3)]
        requests[1].cache_salt = requests[2].cache_salt = b"tenant"
        answers = [await target.answer(each) for each in requests]
        cached = [each.finish.usage.cached_prompt_tokens for each in answers]
        assert cached == [0, 0, 64]
        assert len({tuple(each.ids) for each in answers}) == 1


async def test_rejected_drafts_never_enter_the_cache(model: Path) -> None:
    """An answer made under wrong drafts is a prompt's beginning like any other."""
    (prompt,) = random_prompts([40])
    async with running_target(model) as plain:
        known = await plain.ids(make_request(prompt, 60))
        longer = [*prompt, *known, 7, 8, 9]
        expected = await plain.ids(make_request(longer, 20))
    drafter = ScriptedDrafter(Wrong({tuple(prompt): known}, 384))
    async with drafter, running_target(model, drafter.address) as target:
        assert await target.ids(make_request(prompt, 60, k=8)) == known
        answer = await target.answer(make_request(longer, 20))
        assert answer.ids == expected
        assert answer.finish.usage.cached_prompt_tokens == 96


async def test_preempted_requests_find_their_own_blocks_again(model: Path) -> None:
    """A pool for two of four texts: all of them equal their solo runs."""
    prompts = random_prompts([40, 40, 40, 40])
    requests = [make_request(prompt, 100) for prompt in prompts]
    async with running_target(model) as plain:
        solo = [await plain.ids(request) for request in requests]
    async with running_target(model, kv_tokens=320) as target:
        answers = await answer_all(target, requests)
        assert [each.ids for each in answers] == solo
        assert (await target.status()).load.preemptions > 0
