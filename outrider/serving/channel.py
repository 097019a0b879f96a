"""How services reach each other: message limits and keepalive that agree on both ends."""

from __future__ import annotations

import grpc

from outrider.serving.settings import DEFAULT_MESSAGE_BYTES
from outrider.serving.tls import ClientTls, channel_credentials

MAX_MESSAGE_BYTES = DEFAULT_MESSAGE_BYTES
"""Limit of both directions of every hop, unless the setting `max_message_bytes` says otherwise."""

_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_HANDSHAKE_MS = 10_000
_CONNECT_MS = 2_000
"""Four round trips on a bad line, or a handshake on a machine that is busy."""


def _limits(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        # What the timeout above does not shorten by itself: its default is a minute (measured).
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # Fixed windows of 64 KiB a stream. Else they grow with the bandwidth, and on a fast network
        # 10 MB of a stream pile up in front of a reader that has stopped (measured).
        ("grpc.http2.bdp_probe", 0),
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of a server that accepts channels made by `open_channel`."""
    return [
        *_limits(max_message_bytes),
        # Clients may ping as often as our own do; else the server says too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        # Else who connects and says nothing has a file descriptor for two minutes.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # Two servers on one port would share its clients without anybody noticing.
        ("grpc.so_reuseport", 0),
    ]


def open_channel(
    address: str,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    *,
    tries_again: bool = True,
    tls: ClientTls | None = None,
    server_name: str = "",
) -> grpc.aio.Channel:
    """A channel that finds a dead peer within 15 s and tries again every 0.2 to 2 s.

    One that does not try again is for a caller that opens another in its own time.
    tls: None for plain text. server_name: who the server's certificate must be for, where `address`
    is what that name stands for; empty: the host in `address`.
    """
    options = _dial(max_message_bytes, tries_again, server_name if tls else "")
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


def open_blocking_channel(
    address: str, max_message_bytes: int = MAX_MESSAGE_BYTES, *, tls: ClientTls | None = None
) -> grpc.Channel:
    """The same for a program without an event loop."""
    options = _dial(max_message_bytes, tries_again=True)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(tls), options=options)


def _dial(
    max_message_bytes: int, tries_again: bool, server_name: str = ""
) -> list[tuple[str, int | str]]:
    first_ms, longest_ms = (200, 2_000) if tries_again else (60_000, 60_000)
    connect_ms = _CONNECT_MS if tries_again else 60_000
    named: list[tuple[str, int | str]] = []
    if server_name:
        named.append(("grpc.ssl_target_name_override", server_name))
    return [
        *named,
        *_limits(max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", first_ms),
        # In spite of its name: what an attempt may take, TCP and TLS and the first frame together.
        ("grpc.min_reconnect_backoff_ms", connect_ms),
        ("grpc.max_reconnect_backoff_ms", longest_ms),
        # Each channel keeps its own connections, so closing one never cuts another's streams.
        ("grpc.use_local_subchannel_pool", 1),
    ]
