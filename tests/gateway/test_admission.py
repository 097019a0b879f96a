"""Who is let in: keys, limits of the gateway and of each, draining, and when to come back."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission import Admission, Tenant
from gateway.keys import ApiKey, Keys
from outrider.serving.errors import OutriderError, Overloaded, Unauthenticated, Unavailable


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def wait(self, seconds: float) -> None:
        """Go on."""
        self.now_ns += round(seconds * 1e9)


def keys_of(**limits: dict[str, int]) -> Keys:
    """Keys that are their names."""
    return tuple(
        ApiKey(name, hashlib.sha256(name.encode()).digest(), **each)
        for name, each in limits.items()
    )


def overload(admission: Admission, tenant: Tenant) -> Overloaded:
    """What a request is refused with, which is what the question before it says."""
    told = admission.refusal(tenant)
    with pytest.raises(Overloaded) as caught, admission.admit(tenant):
        pass
    assert isinstance(told, Overloaded)
    assert (str(told), told.retry_after_s) == (str(caught.value), caught.value.retry_after_s)
    return caught.value


def test_without_keys_everybody_is_let_in() -> None:
    """What a client sends as its key then means nothing, and nothing is limited."""
    admission = Admission(max_concurrent=2)
    for header in (None, "Bearer x", "\x00", "x" * 10**6):
        assert admission.identify(header) == Tenant("", b"", None, None)
    with admission.admit(admission.identify(None)) as place:
        place.spend(10**9)


def test_a_key_says_who_asks() -> None:
    """Its name, its limits, and a salt that no other has."""
    admission = Admission(max_concurrent=2, keys=keys_of(a={"priority": -5, "max_tokens": 7}, b={}))
    a, b = admission.identify("Bearer a"), admission.identify("bearer  b")
    assert (a.name, a.priority, a.max_tokens) == ("a", -5, 7)
    assert (b.name, b.priority, b.max_tokens) == ("b", None, None)
    assert len({a.cache_salt, b.cache_salt, b""}) == 3


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer c", "Bearer A", "Bearer aa", "a"])
@pytest.mark.parametrize("keys", [keys_of(a={}), ()])
def test_who_has_no_key(header: str | None, keys: Keys) -> None:
    """Is not let in, also where there are no keys at all; the message says what to send."""
    with pytest.raises(Unauthenticated, match="; send the header `authorization: Bearer KEY`$"):
        Admission(max_concurrent=2, keys=keys).identify(header)


def test_the_gateways_limit() -> None:
    """Places are counted over all keys, and free again however a request ends."""
    admission = Admission(max_concurrent=2, keys=keys_of(a={}, b={}))
    a, b = admission.identify("Bearer a"), admission.identify("Bearer b")
    with contextlib.ExitStack() as stack:
        stack.enter_context(admission.admit(a))
        stack.enter_context(admission.admit(b))
        error = overload(admission, a)
        assert str(error) == (
            "the gateway serves 2 requests at once (max_concurrent); try again in 1.0 s"
        )
        assert error.retry_after_s == 1
        assert admission.num_running == 2
    with pytest.raises(KeyError), admission.admit(a):
        raise KeyError
    assert admission.num_running == 0
    assert admission.refusal(a) is None


def test_a_keys_own_limit() -> None:
    """One key that is at its limit keeps nobody else out."""
    admission = Admission(max_concurrent=9, keys=keys_of(a={"max_concurrent": 1}, b={}))
    a, b = admission.identify("Bearer a"), admission.identify("Bearer b")
    with admission.admit(a):
        error = overload(admission, a)
        assert str(error) == (
            "the key a may have 1 requests at once (max_concurrent); try again in 1.0 s"
        )
        with admission.admit(b):
            assert admission.num_running == 2
    with admission.admit(a):
        pass


def test_requests_a_minute() -> None:
    """A minute's worth at once, then one whenever the refusal says so; refusals cost none."""
    clock = Clock()
    admission = Admission(
        max_concurrent=9, keys=keys_of(a={"requests_per_minute": 7}, b={}), clock_ns=clock
    )
    a, b = admission.identify("Bearer a"), admission.identify("Bearer b")
    for _ in range(7):
        with admission.admit(a):
            pass
    error = [overload(admission, a) for _ in range(5)][-1]
    assert str(error) == (
        "the key a may have 7 requests a minute (requests_per_minute); try again in 8.6 s"
    )
    assert error.retry_after_s == 8.571428572
    assert admission.refusal(b) is None
    clock.wait(8.571428571)
    assert admission.refusal(a) is not None
    clock.wait(1e-9)
    with admission.admit(a):
        pass
    assert admission.refusal(a) is not None


def test_tokens_a_minute() -> None:
    """They are counted as they come, end no request, and are owed before the next one."""
    clock = Clock()
    admission = Admission(
        max_concurrent=9, keys=keys_of(a={"tokens_per_minute": 60}), clock_ns=clock
    )
    a = admission.identify("Bearer a")
    with admission.admit(a) as place:
        place.spend(50)
        for _ in range(20):
            place.spend(1)
        error = overload(admission, a)
    assert str(error) == (
        "the key a may have 60 tokens a minute (tokens_per_minute); try again in 10.0 s"
    )
    assert error.retry_after_s == 10
    clock.wait(10)
    assert admission.refusal(a) is None


def test_the_longest_wait_is_told() -> None:
    """Who comes back when told is not sent away for a reason that was there before."""
    clock = Clock()
    limits = {"max_concurrent": 1, "requests_per_minute": 2, "tokens_per_minute": 60}
    admission = Admission(max_concurrent=1, keys=keys_of(a=limits), clock_ns=clock)
    a = admission.identify("Bearer a")
    with admission.admit(a) as place:
        assert "requests at once (max_concurrent)" in str(overload(admission, a))
        place.spend(63)
        assert "(tokens_per_minute); try again in 3.0 s" in str(overload(admission, a))
    clock.wait(3)
    with admission.admit(a) as place:
        place.spend(1)
    assert "(requests_per_minute); try again in 27.0 s" in str(overload(admission, a))


@pytest.mark.parametrize("keys", [None, keys_of(a={"max_concurrent": 1})])
def test_draining(keys: Keys | None) -> None:
    """Nobody new is let in, whatever else is wrong; who runs goes on and can spend."""
    admission = Admission(max_concurrent=1, keys=keys)
    tenant = admission.identify("Bearer a")
    with admission.admit(tenant) as place:
        admission.drain()
        place.spend(1)
        for error in (admission.refusal(tenant), _raised(admission, tenant)):
            assert isinstance(error, Unavailable)
            assert str(error) == "the gateway is shutting down"


def _raised(admission: Admission, tenant: Tenant) -> OutriderError:
    with pytest.raises(OutriderError) as caught, admission.admit(tenant):
        pass
    return caught.value


def test_a_removed_key() -> None:
    """It is refused from then on; what runs with it ends in order, and gives its place back."""
    admission = Admission(max_concurrent=9, keys=keys_of(a={"tokens_per_minute": 1}, b={}))
    with admission.admit(admission.identify("Bearer a")) as place:
        admission.take_keys(keys_of(b={}))
        with pytest.raises(Unauthenticated, match="the API key is not known"):
            admission.identify("Bearer a")
        assert admission.identify("Bearer b").name == "b"
        place.spend(5)
        assert admission.num_running == 1
    assert admission.num_running == 0


def test_use_outlives_a_reload() -> None:
    """Same limits, same account: a file that is written again forgives nothing."""
    clock = Clock()
    limits = {"max_concurrent": 2, "requests_per_minute": 60, "tokens_per_minute": 60}
    admission = Admission(max_concurrent=9, keys=keys_of(a=limits), clock_ns=clock)
    with admission.admit(admission.identify("Bearer a")) as place:
        place.spend(90)
        admission.take_keys(keys_of(c={}, a=limits))
        a = admission.identify("Bearer a")
        assert overload(admission, a).retry_after_s == 30
        clock.wait(30)
        with admission.admit(a):
            assert "2 requests at once" in str(overload(admission, a))
    admission.take_keys(
        tuple(ApiKey("new-name", key.sha256, tokens_per_minute=60) for key in keys_of(a={}))
    )
    with admission.admit(admission.identify("Bearer a")) as place:
        place.spend(1)
        assert "the key new-name may have" in str(overload(admission, a))


def test_changed_limits_count_at_once() -> None:
    """Also for who has been identified already; what is owed stays owed."""
    clock = Clock()
    admission = Admission(
        max_concurrent=9, keys=keys_of(a={"tokens_per_minute": 60}), clock_ns=clock
    )
    a = admission.identify("Bearer a")
    with admission.admit(a) as place:
        place.spend(120)
        assert overload(admission, a).retry_after_s == 60
        admission.take_keys(keys_of(a={"tokens_per_minute": 600, "max_tokens": 5}))
        assert overload(admission, a).retry_after_s == 6
        assert admission.identify("Bearer a").max_tokens == 5
        admission.take_keys(keys_of(a={"max_concurrent": 1}))
        assert "1 requests at once" in str(overload(admission, a))
        admission.take_keys(keys_of(a={}))
        assert admission.refusal(a) is None
        admission.take_keys(keys_of(a={"requests_per_minute": 1}))
        assert admission.refusal(a) is None  # a new limit begins with all of it


def test_nothing_is_kept_of_strangers() -> None:
    """Ten thousand keys that are not known, and files that come and go, leave no memory behind."""
    admission = Admission(max_concurrent=9, keys=keys_of(a={}))

    def strain(start: int) -> int:
        for number in range(start, start + 2000):
            with contextlib.suppress(Unauthenticated):
                admission.identify(f"Bearer stranger-{number}")
            if number % 20 == 0:
                admission.take_keys(keys_of(**{f"k{number + each}": {} for each in range(5)}))
        gc.collect()
        return sys.getallocatedblocks()

    strain(0)
    before = strain(10_000)
    assert strain(20_000) < before + 1000


@settings(max_examples=50)
@given(
    per_minute=st.integers(1, 30),
    most=st.integers(1, 4),
    arrivals=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 40)), max_size=40),
)
def test_who_waits_as_told_is_let_in(
    per_minute: int, most: int, arrivals: list[tuple[float, int]]
) -> None:
    """After `retry_after_s` a key that runs nothing gets in, and its counts are right always."""
    clock = Clock()
    limits = {"requests_per_minute": per_minute, "tokens_per_minute": 60, "max_concurrent": most}
    admission = Admission(max_concurrent=9, keys=keys_of(a=limits), clock_ns=clock)
    tenant = admission.identify("Bearer a")
    for wait_s, num_tokens in arrivals:
        clock.wait(wait_s)
        error = admission.refusal(tenant)
        if isinstance(error, Overloaded):
            clock.wait(error.retry_after_s)
        with admission.admit(tenant) as place:
            place.spend(num_tokens)
            assert admission.num_running == 1
    assert admission.num_running == 0
