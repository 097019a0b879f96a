"""Who may ask, and how much at once: keys, limits of the gateway and of each key, draining.

Nothing waits here. A target has a waiting line (`max_waiting`), where priorities count and waiting
raises them; a second line before it would know neither of them, and would hold what no target has
counted. So what is over a limit is refused at once, with the setting that says so and the time
after which to come back, and a refusal costs microseconds.

What is kept is one account for each known key, and none for anybody else.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.buckets import ClockNs, TokenBucket
from gateway.keys import ApiKey, Keys, bearer_key, key_hash, unknown_key
from outrider.serving.errors import OutriderError, Overloaded, Unavailable

_RETRY_AFTER_S = 1.0
"""Where a place gets free when some request ends, and nobody knows when."""


class Admission:
    """All requests of a gateway."""

    def __init__(
        self,
        *,
        max_concurrent: int,
        keys: Keys | None = None,
        clock_ns: ClockNs = time.monotonic_ns,
    ) -> None:
        """keys: None for a gateway that asks for none. clock_ns: see `TokenBucket`."""
        self._max_concurrent = max_concurrent
        self._clock_ns = clock_ns
        self._accounts: dict[bytes, _Account] | None = None  # by the hash of the key
        self._num_running = 0
        self.draining = False
        """New requests are refused."""
        if keys is not None:
            self.take_keys(keys)

    @property
    def num_running(self) -> int:
        """Requests that have a place."""
        return self._num_running

    def take_keys(self, keys: Keys) -> None:
        """These are known from now on, and no others; what runs goes on.

        A key that was known before keeps its account: what runs, and what it has used.
        """
        before = self._accounts or {}
        self._accounts = {
            key.sha256: before.get(key.sha256) or _Account(key, self._clock_ns) for key in keys
        }
        for key in keys:
            self._accounts[key.sha256].limit_to(key)

    def identify(self, authorization: str | None) -> Tenant:
        """Whose key it is. Raises Unauthenticated."""
        if self._accounts is None:
            return _ANYBODY
        account = self._accounts.get(key_hash(bearer_key(authorization)))
        if account is None:
            raise unknown_key()
        return account.tenant

    def drain(self) -> None:
        """Refuse new requests; running ones go on."""
        self.draining = True

    def refusal(self, tenant: Tenant) -> OutriderError | None:
        """What `admit` would raise now."""
        if self.draining:
            return Unavailable("the gateway is shutting down")
        error = tenant.account.refusal() if tenant.account else None
        if error is None and self._num_running >= self._max_concurrent:
            return Overloaded(
                f"the gateway serves {self._max_concurrent} requests at once (max_concurrent); "
                f"try again in {_RETRY_AFTER_S} s",
                _RETRY_AFTER_S,
            )
        return error

    @contextlib.contextmanager
    def admit(self, tenant: Tenant) -> Iterator[Place]:
        """A place for one request, until the end of the block.

        Raises Unavailable and Overloaded.
        """
        error = self.refusal(tenant)
        if error is not None:
            raise error
        account = tenant.account
        self._num_running += 1
        if account:
            account.enter()
        try:
            yield Place(account)
        finally:
            self._num_running -= 1
            if account:
                account.num_running -= 1


class Place:
    """Of a request that runs."""

    def __init__(self, account: _Account | None) -> None:
        self._account = account

    def spend(self, num_tokens: int) -> None:
        """Count tokens of the prompt, once, and of the answer, as they come."""
        if self._account:
            self._account.spend(num_tokens)


class _Account:
    """What one key has running and what it has used."""

    def __init__(self, key: ApiKey, clock_ns: ClockNs) -> None:
        self.num_running = 0
        self._clock_ns = clock_ns
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.limit_to(key)

    def limit_to(self, key: ApiKey) -> None:
        """The limits are now these."""
        self._key = key
        self._requests = self._bucket(self._requests, key.requests_per_minute)
        self._tokens = self._bucket(self._tokens, key.tokens_per_minute)
        self.tenant = Tenant(key.name, key.cache_salt, key.priority, key.max_tokens, self)

    def refusal(self) -> Overloaded | None:
        """Why there is no place for a request now; of several reasons the one that lasts."""
        key = self._key
        waits = [
            (bucket.retry_after_s(num_units), f"{bucket.per_minute} {of} a minute ({setting})")
            for bucket, num_units, of, setting in (
                (self._requests, 1, "requests", "requests_per_minute"),
                (self._tokens, 0, "tokens", "tokens_per_minute"),
            )
            if bucket
        ]
        if key.max_concurrent is not None and self.num_running >= key.max_concurrent:
            waits.append(
                (_RETRY_AFTER_S, f"{key.max_concurrent} requests at once (max_concurrent)")
            )
        wait_s, limit = max(waits, default=(0.0, ""))
        if not wait_s:
            return None
        shown_s = math.ceil(wait_s * 10) / 10
        return Overloaded(
            f"the key {key.name} may have {limit}; try again in {shown_s:.1f} s", wait_s
        )

    def enter(self) -> None:
        """A request begins."""
        self.num_running += 1
        if self._requests:
            self._requests.spend(1)

    def spend(self, num_tokens: int) -> None:
        """A request has used tokens."""
        if self._tokens:
            self._tokens.spend(num_tokens)

    def _bucket(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return TokenBucket(per_minute, self._clock_ns)
        bucket.per_minute = per_minute
        return bucket


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks, and what its requests may do; None for no limit."""

    name: str = ""
    """Of the key, as the operator calls it."""
    cache_salt: bytes = b""
    """What keeps its cached prefixes from everybody else's."""
    priority: int | None = None
    """Of its requests, which may only lower it."""
    max_tokens: int | None = None
    """Most that a request may ask for."""
    account: _Account | None = field(default=None, repr=False, compare=False)


_ANYBODY = Tenant()
