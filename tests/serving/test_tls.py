"""TLS with real certificates and sockets: who is let in, who is refused, how files are changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import structlog.testing
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.serving.channel import open_blocking_channel, open_channel, server_options
from outrider.serving.refusals import explain_refusal
from outrider.serving.settings import GatewaySettings, SettingsError, TargetSettings
from outrider.serving.tls import ClientTls, ServerTls, server_credentials, ssl_context
from outrider.serving.tls_settings import client_tls, server_tls
from tests.support.certificates import Authority, Pair
from tests.support.relay import Relay

SERVING = health_pb2.HealthCheckResponse.SERVING


@contextlib.asynccontextmanager
async def served(tls: ServerTls | None) -> AsyncIterator[str]:
    """The address of a server that says that it is well."""
    server = grpc.aio.server(options=server_options())
    servicer = health.aio.HealthServicer()
    await servicer.set("", SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(tls))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def asked(address: str, tls: ClientTls | None, server_name: str = "") -> str:
    """Empty for a good answer, else why there is none."""
    async with open_channel(address, tls=tls, server_name=server_name) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            return explain_refusal(error.details(), tls, server_name) or error.details()
    return ""


async def test_both_ends_show_a_certificate(authority: Authority) -> None:
    """The client trusts the server's CA and the server the client's; a name stands for the address
    that is dialled."""
    pair = authority.issue("service", "127.0.0.1", "target")
    async with served(ServerTls(pair.cert, pair.key, authority.ca)) as address:
        ours = ClientTls(authority.ca, pair.cert, pair.key)
        assert await asked(address, ours) == ""
        assert await asked(address, ours, "target") == ""
        assert await asked(address, ours, "127.0.0.1") == ""
        assert "not for draft" in await asked(address, ours, "draft")


async def test_who_is_not_let_in_is_told_why(authority: Authority, other: Authority) -> None:
    """A server with a wrong, expired or unknown certificate is refused in so many words."""
    trusting = ClientTls(authority.ca)
    for pair, why in [
        (authority.issue("expired", expired=True), "certificate has expired"),
        (authority.issue("elsewhere", "elsewhere"), "it is not for the host that is dialled"),
        (other.issue("foreign"), "not signed by tls_ca"),
    ]:
        async with served(ServerTls(pair.cert, pair.key)) as address:
            reason = await asked(address, trusting)
            assert reason.startswith("certificate verify failed: ") and why in reason
    async with served(None) as address:
        assert await asked(address, trusting) == "it speaks no TLS"


async def test_a_far_server_is_reached(authority: Authority) -> None:
    """A handshake takes several round trips; of 200 ms each they are no reason to give up."""
    pair = authority.issue("service")
    async with (
        served(ServerTls(pair.cert, pair.key)) as address,
        Relay(address, delay_s=0.1) as relay,
    ):
        assert await asked(relay.address, ClientTls(authority.ca)) == ""


async def test_a_client_needs_a_good_certificate(authority: Authority, other: Authority) -> None:
    """Without one, with one of another CA or an expired one, and in plain text nobody gets in; what
    the client says of it names the setting."""
    pair = authority.issue("service")
    foreign, expired = other.issue("foreign"), authority.issue("old", expired=True)
    async with served(ServerTls(pair.cert, pair.key, authority.ca)) as address:
        for tls, why in [
            (ClientTls(authority.ca), "tls_cert is not set"),
            (ClientTls(authority.ca, foreign.cert, foreign.key), "refuses our certificate"),
            (ClientTls(authority.ca, expired.cert, expired.key), "refuses our certificate"),
            (None, "tls_ca is not set"),
        ]:
            assert why in await asked(address, tls)


async def test_a_new_certificate_is_taken_without_a_restart(authority: Authority) -> None:
    """New connections meet the new certificate and the new CA; an open stream goes on."""
    live, new = authority.issue("live", "old.name"), authority.issue("new", "new.name")
    tls = ClientTls(authority.ca)
    async with (
        served(ServerTls(live.cert, live.key)) as address,
        open_channel(address, tls=tls, server_name="old.name") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        with structlog.testing.capture_logs() as lines:
            new.copy_to(live)
            assert await asked(address, tls, "new.name") == ""
            assert "not for old.name" in await asked(address, tls, "old.name")
        assert [line["event"] for line in lines] == ["new TLS files are taken"]
        assert not watch.done()
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
        watch.cancel()


async def test_a_new_ca_lets_the_old_clients_in_no_more(
    authority: Authority, other: Authority
) -> None:
    """The server's CA is read again, and so is the client's with the next channel."""
    pair, theirs = authority.issue("service"), other.issue("service")
    async with served(ServerTls(pair.cert, pair.key, authority.ca)) as address:
        old = ClientTls(authority.ca, pair.cert, pair.key)
        assert await asked(address, old) == ""
        live_ca = authority.ca.read_bytes()
        authority.ca.write_bytes(other.ca.read_bytes())
        theirs.copy_to(pair)
        assert await asked(address, old) == ""  # the same object: it has followed
        authority.ca.write_bytes(live_ca)
        assert await asked(address, ClientTls(other.ca, pair.cert, pair.key)) != ""


@pytest.mark.parametrize("damage", ["half", "unfit", "gone", "no key", "pipe"])
async def test_bad_new_files_are_not_taken(authority: Authority, damage: str) -> None:
    """What was good stays, one line says why, with nothing of what the files hold; good files are
    taken when they come."""
    live, new = authority.issue("live", "old.name"), authority.issue("new", "new.name")
    tls = ClientTls(authority.ca)
    async with served(ServerTls(live.cert, live.key)) as address:
        with structlog.testing.capture_logs() as lines:
            if damage == "half":
                text = new.cert.read_bytes()
                live.cert.write_bytes(text[: len(text) // 2])
            elif damage == "unfit":
                live.cert.write_bytes(new.cert.read_bytes())
            elif damage == "gone":
                live.cert.unlink()
            elif damage == "pipe":
                live.cert.unlink()
                os.mkfifo(live.cert)
            else:
                live.key.write_bytes(live.cert.read_bytes())
            for _ in range(3):
                assert await asked(address, tls, "old.name") == ""
        (line,) = lines
        assert line["event"] == "new TLS files are not taken, the old ones stay"
        assert line["reason"].startswith("tls_") and "BEGIN" not in str(line)
        if damage == "pipe":
            live.cert.unlink()
        new.copy_to(live)
        assert await asked(address, tls, "new.name") == ""


def greeted(port: int, ca: Path, name: str, pair: Pair | None = None) -> bool:
    """Whether a server that greets those whom it lets in does so; the client trusts `ca`."""
    context = ssl.create_default_context(cafile=ca)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    with (
        contextlib.suppress(ConnectionError, ssl.SSLError),
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        return connection.recv(10) == b"hello"
    return False


async def test_other_servers_follow_the_files_too(authority: Authority, other: Authority) -> None:
    """A server on Python's sockets takes the new pair and the new clients' CA, and no other."""
    live = authority.issue("live", "old.name")
    new, client, stranger = (
        authority.issue("new", "new.name"),
        authority.issue("client"),
        other.issue("stranger"),
    )

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    context = ssl_context(ServerTls(live.cert, live.key, authority.ca))
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    trusted = authority.ca.with_name("trusted.pem")
    trusted.write_bytes(authority.ca.read_bytes())
    async with server:
        assert await asyncio.to_thread(greeted, port, trusted, "old.name", client)
        for nobody in (None, stranger):
            assert not await asyncio.to_thread(greeted, port, trusted, "old.name", nobody)
        new.copy_to(live)
        authority.ca.write_bytes(other.ca.read_bytes())
        assert await asyncio.to_thread(greeted, port, trusted, "new.name", stranger)
        assert not await asyncio.to_thread(greeted, port, trusted, "new.name", client)


def test_a_program_without_an_event_loop_dials_too(authority: Authority) -> None:
    """The blocking channel takes the same files."""
    pair = authority.issue("service")
    with open_blocking_channel("127.0.0.1:1", tls=ClientTls(authority.ca, *vars(pair).values())):
        pass


def test_half_a_pair_and_files_of_no_use_are_refused_by_name(
    authority: Authority, tmp_path: Path
) -> None:
    """At the start, with the setting's name and never a file's contents."""
    pair, unfit = authority.issue("one"), authority.issue("two")
    cert, key, ca = str(pair.cert), str(pair.key), str(authority.ca)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(2**30)
    for settings, match in [
        ({"tls_cert": cert}, "tls_cert is set without tls_key"),
        ({"tls_key": key}, "tls_key is set without tls_cert"),
        ({"tls_client_ca": ca}, "tls_client_ca is set without"),
        ({"tls_cert": cert, "tls_key": str(tmp_path / "none")}, "tls_key cannot be read: No such"),
        ({"tls_cert": str(tmp_path), "tls_key": key}, "tls_cert cannot be read: not a reg"),
        ({"tls_cert": cert, "tls_key": str(pipe)}, "tls_key cannot be read: not a regular file"),
        ({"tls_cert": str(large), "tls_key": key}, "tls_cert is larger than"),
        ({"tls_cert": cert, "tls_key": str(unfit.key)}, "tls_key does not fit tls_cert"),
        ({"tls_cert": key, "tls_key": key}, "tls_cert holds no certificate"),
        ({"tls_cert": cert, "tls_key": cert}, "tls_key holds no private key"),
        ({"tls_cert": str(empty), "tls_key": key}, "tls_cert is no whole PEM file"),
        ({"tls_cert": cert, "tls_key": key, "tls_client_ca": key}, "tls_client_ca holds no"),
        ({"tls_cert": cert, "tls_key": key, "tls_client_ca": "\0"}, "tls_client_ca cannot be read"),
    ]:
        with pytest.raises(SettingsError, match=match) as refused:
            server_tls(TargetSettings(**settings))
        assert "BEGIN" not in str(refused.value)
    with pytest.raises(SettingsError, match="tls_ca cannot be read"):
        client_tls(GatewaySettings(tls_ca=str(tmp_path / "none")))
    with pytest.raises(SettingsError, match="tls_cert is set without tls_key"):
        client_tls(GatewaySettings(tls_ca=ca, tls_cert=cert))


def test_a_key_with_a_passphrase_is_refused(authority: Authority) -> None:
    """Nobody is asked to type one."""
    from cryptography.hazmat.primitives import serialization

    pair = authority.issue("one")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(SettingsError, match="tls_key has a passphrase"):
        ServerTls(pair.cert, pair.key)


def test_without_settings_there_is_no_tls() -> None:
    """The default is plain text, on loopback."""
    assert server_tls(TargetSettings()) is None
    assert client_tls(TargetSettings()) is None
    assert TargetSettings().host == "127.0.0.1"
