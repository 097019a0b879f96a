"""TLS with certificates on both sides of every hop: the same answers, and nobody else gets in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import structlog.testing
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.service import DraftService
from outrider.serving.channel import open_channel
from outrider.serving.server import listening
from outrider.serving.settings import DraftSettings
from outrider.serving.tls import ClientTls, ServerTls
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc
from tests.support.certificates import Authority, Pair
from tests.support.gateways import Gateway, gateway_on, target_status, write_tokenizer_folder
from tests.support.in_process import Target, running_target
from tests.support.processes import killed_at_end, running_process, spawn
from tests.support.scripted_target import Script, serving
from tests.support.stacks import ask, full_stack
from tests.support.token_requests import make_request, wait_for_drafters

pytestmark = pytest.mark.timeout(60)

PROMPT = "The quick brown fox jumps over the quick brown fox jumps over the quick"
_RETRIES_S = 1.5
"""Several attempts to connect, of a gateway and of a target."""


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")


def of_server(authority: Authority, pair: Pair) -> dict[str, str]:
    """Settings of a service that lets in whom the authority has signed."""
    both = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    return both | {"tls_client_ca": str(authority.ca)}


@contextlib.asynccontextmanager
async def stack_with_tls(
    model: Path, authority: Authority
) -> AsyncIterator[tuple[Gateway, Target, ClientTls]]:
    """Draft, target and gateway, each with a certificate of its own; and a client's files."""
    pairs = {name: authority.issue(name) for name in ("draft", "target", "gateway", "client")}
    settings = {name: of_server(authority, pair) for name, pair in pairs.items()}
    ca = {"tls_ca": str(authority.ca)}
    client = ClientTls(authority.ca, pairs["client"].cert, pairs["client"].key)
    draft_service = DraftService(DraftSettings(port=0, **settings["draft"]))
    async with (
        listening(draft_service, "127.0.0.1", 0) as draft,
        running_target(
            model, f"127.0.0.1:{draft.port}", tls=client, **settings["target"], **ca
        ) as target,
        gateway_on(model, [target.address], tls=client, **settings["gateway"], **ca) as gateway,
    ):
        await gateway.wait_health(True)
        yield gateway, target, client


async def test_answers_through_tls_are_the_plain_ones(
    tiny_model: Path, authority: Authority
) -> None:
    """Token for token, with drafts that came through TLS too; without a certificate, or in plain
    text, no port answers, be it for health."""
    async with full_stack(tiny_model) as (gateway, _):
        plain = await ask(gateway, PROMPT, 0, max_tokens=48)
    async with stack_with_tls(tiny_model, authority) as (gateway, target, client):
        await wait_for_drafters(target)
        answer = await ask(gateway, PROMPT, 4, max_tokens=48)
        assert (answer.ids, answer.text) == (plain.ids, plain.text)
        assert answer.finish.speculation.drafted > 0
        (drafter,) = (await target.status()).drafters
        for address in (gateway.address, target.address, drafter.address):
            for tls, served in [(client, True), (ClientTls(authority.ca), False), (None, False)]:
                assert await answers(address, tls) is served


async def answers(address: str, tls: ClientTls | None) -> bool:
    """Whether the health service there says anything."""
    async with open_channel(address, tls=tls) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
    return True


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("wrong CA", "certificate verify failed: unable to get local issuer certificate"),
        ("expired", "certificate verify failed: certificate has expired"),
        ("wrong name", "certificate verify failed: it is not for 127.0.0.1"),
        ("no client certificate", "perhaps it wants a certificate, and tls_cert is not set"),
        ("wrong client certificate", "perhaps it refuses our certificate, tls_cert"),
        ("no TLS there", "it speaks no TLS"),
    ],
)
async def test_a_gateway_says_once_why_a_target_is_refused_and_takes_it_when_it_is_repaired(
    tiny_folder: Path, authority: Authority, other: Authority, trouble: str, why: str
) -> None:
    """One line for however many attempts, and in what clients are told. New files, of whichever
    side, are used with the next attempt, without a restart."""
    good = authority.issue("good")
    pairs = {
        "wrong CA": other.issue("foreign"),
        "expired": authority.issue("expired", expired=True),
        "wrong name": authority.issue("elsewhere", "elsewhere"),
    }
    live = Pair(authority.ca.with_name("live.pem"), authority.ca.with_name("live.key"))
    pairs.get(trouble, good).copy_to(live)
    ours = Pair(authority.ca.with_name("ours.pem"), authority.ca.with_name("ours.key"))
    (other.issue("stranger") if trouble == "wrong client certificate" else good).copy_to(ours)
    client = {"tls_ca": str(authority.ca)}
    if trouble != "no client certificate":
        client |= {"tls_cert": str(ours.cert), "tls_key": str(ours.key)}
    server = None if trouble == "no TLS there" else ServerTls(live.cert, live.key, authority.ca)
    either = authority.ca.with_name("either.pem")
    either.write_bytes(authority.ca.read_bytes() + other.ca.read_bytes())
    asking = ClientTls(either) if "tls_cert" in client else None
    with structlog.testing.capture_logs() as lines:
        async with (
            serving(Script(ids=[5]), target_status(tiny_folder), tls=server) as target,
            gateway_on(tiny_folder, [target.address], tls=asking, **client) as gateway,
        ):
            await asyncio.sleep(_RETRIES_S)
            refused = [line for line in lines if line["event"] == "target is not ready"]
            assert [why in line["reason"] for line in refused] == [True]
            await gateway.wait_health(False)
            if trouble not in ("no client certificate", "no TLS there"):
                good.copy_to(live)
                good.copy_to(ours)
                await gateway.wait_health(True)
    text = json.dumps(lines, default=str)
    assert "Traceback" not in text and "PRIVATE" not in text and str(authority.ca) not in text


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("wrong CA", "certificate verify failed: unable to get local issuer certificate"),
        ("no client certificate", "perhaps it wants a certificate, and tls_cert is not set"),
        ("no TLS here", "perhaps it wants TLS, and tls_ca is not set"),
    ],
)
async def test_a_target_goes_on_without_a_drafter_that_it_cannot_trust(
    tiny_model: Path, authority: Authority, other: Authority, trouble: str, why: str
) -> None:
    """One line says why; requests are answered."""
    pair = (other if trouble == "wrong CA" else authority).issue("draft")
    settings = {} if trouble == "no TLS here" else {"tls_ca": str(authority.ca)}
    service = DraftService(DraftSettings(port=0, **of_server(authority, pair)))
    with structlog.testing.capture_logs() as lines:
        async with (
            listening(service, "127.0.0.1", 0) as draft,
            running_target(tiny_model, f"127.0.0.1:{draft.port}", **settings) as target,
        ):
            await asyncio.sleep(_RETRIES_S)
            (drafter,) = (await target.status()).drafters
            assert why in drafter.reason
            assert len(await target.ids(make_request([5, 6, 7], 4))) == 4
    unused = [line for line in lines if line["event"] == "drafter unused"]
    assert [why in line["reason"] for line in unused] == [True]


async def test_a_certificate_may_be_for_the_name_that_is_configured(
    tiny_folder: Path, authority: Authority
) -> None:
    """A name is looked up and its addresses are dialled: the certificate is for the name."""
    named, pair = authority.issue("named", "localhost"), authority.issue("gateway")
    async with (
        serving(
            Script(ids=[5]), target_status(tiny_folder), tls=ServerTls(named.cert, named.key)
        ) as target,
        gateway_on(
            tiny_folder,
            [f"localhost:{target.address.rpartition(':')[2]}"],
            tls_ca=str(authority.ca),
            tls_cert=str(pair.cert),
            tls_key=str(pair.key),
            tls=ClientTls(authority.ca),
        ) as gateway,
    ):
        await gateway.wait_health(True)


async def test_a_new_certificate_breaks_no_open_stream(
    tmp_path: Path, authority: Authority
) -> None:
    """A drafter's process takes new files, or keeps the old ones when they are bad, while a stream
    is open; whoever is refused leaves nothing but JSON in its log."""
    live = authority.issue("live", "old.name")
    new = authority.issue("new", "new.name")
    flags = of_server(authority, live)
    mine = authority.issue("client")
    client = ClientTls(authority.ca, mine.cert, mine.key)
    async with running_process("draft", tmp_path, **flags) as draft:
        async with open_channel(draft.address, tls=client, server_name="old.name") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            live.cert.write_bytes(new.cert.read_bytes())  # its key is not there yet
            for _ in range(3):
                assert not await answers(draft.address, None)
                assert not await answers(draft.address, ClientTls(authority.ca))
            await draft.wait_event("new TLS files are not taken, the old ones stay", 5)
            new.copy_to(live)
            async with open_channel(draft.address, tls=client, server_name="new.name") as fresh:
                stub = draft_pb2_grpc.DraftStub(fresh)
                await stub.GetStatus(draft_pb2.DraftGetStatusRequest(), timeout=5)
            assert not watch.done()
            watch.cancel()
        draft.terminate()
        assert await draft.wait_exit() == 0
        lines = draft.output.splitlines()
        events = [json.loads(line) for line in lines]  # nothing of gRPC's own, no traceback
        said = [event["event"] for event in events if "TLS" in event["event"]]
        assert said == [
            "new TLS files are not taken, the old ones stay",
            "new TLS files are taken",
        ]
        assert "PRIVATE" not in draft.output and str(tmp_path) not in draft.output


async def test_a_service_with_files_of_no_use_does_not_start(
    tmp_path: Path, authority: Authority
) -> None:
    """It ends at once with status 2 and the setting's name; one that others can reach without TLS
    says so in one line."""
    pair, unfit = authority.issue("one"), authority.issue("two")
    with killed_at_end(spawn("draft", tmp_path, tls_cert=pair.cert, tls_key=unfit.key)) as bad:
        assert await bad.wait_exit() == 2
        assert "draft: tls_key does not fit tls_cert" in bad.output
    async with running_process("draft", tmp_path, host="0.0.0.0") as draft:
        await draft.wait_event("other machines can reach this port, and it has no TLS", 5)


def http_status(port: int, ca: Path, name: str) -> int:
    """Of `GET /healthz` over TLS. Raises OSError for a server that is not trusted."""
    context = ssl.create_default_context(cafile=ca)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        connection.sendall(f"GET /healthz HTTP/1.1\r\nhost: {name}\r\n\r\n".encode())
        return int(connection.recv(100).split()[1])


async def test_the_http_door_has_the_same_certificate(
    tiny_folder: Path, tmp_path: Path, authority: Authority
) -> None:
    """It follows a change too, and plain text gets no answer."""
    live = authority.issue("live", "old.name")
    settings = {"tls_cert": live.cert, "tls_key": live.key, "http_port": 0}
    settings |= {"model": tiny_folder, "targets": "127.0.0.1:1"}
    async with running_process("gateway", tmp_path, **settings) as gateway:
        port = gateway.http_port
        assert await asyncio.to_thread(http_status, port, authority.ca, "old.name") == 200
        authority.issue("new", "new.name").copy_to(live)
        assert await asyncio.to_thread(http_status, port, authority.ca, "new.name") == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(http_status, port, authority.ca, "old.name")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: new.name\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await reader.read()
        writer.close()
        assert [json.loads(line)["event"] for line in gateway.output.splitlines()]
        assert "Traceback" not in gateway.output
