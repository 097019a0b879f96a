"""What `outrider doctor` says of the services: who answers at the configured addresses.

Short blocking calls; protobuf stays in this file. Knows nothing of how services are started.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.finding import Finding, ok, problem, warning
from outrider.cli.ports import why_not
from outrider.client.wire import key_metadata
from outrider.serving.channel import open_blocking_channel
from outrider.serving.refusals import explain_refusal
from outrider.serving.settings import SettingsError, split_addresses
from outrider.serving.tls import ClientTls
from outrider.serving.tls_settings import client_tls
from outrider.text import counted
from protos.outrider.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)

TIMEOUT_S = 1.5
"""Less than an attempt to connect may take: who takes the connection and says nothing is told apart
from who hangs up."""
FULL_NAMES = {
    "gateway": "outrider.v1.Inference",
    "target": "outrider.v1.Target",
    "draft": "outrider.v1.Draft",
}
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass(frozen=True, slots=True)
class Place:
    """An address and who should be there."""

    service: str
    address: str
    asked_by: str = ""
    """The service whose settings name it; empty: where this machine's own would listen."""
    tls: ClientTls | None = None
    api_key: str | None = None
    """What a gateway is shown."""


def places(
    settings: Mapping[str, Any], tls: ClientTls | None, api_key: str | None = None
) -> list[Place]:
    """Every configured address, each once a service; `settings` are by service.

    tls, api_key: how to ask a gateway. The others are asked as whoever calls them asks.
    """
    callers = {
        "gateway": tls,
        "target": _calls(settings["gateway"]),
        "draft": _calls(settings["target"]),
    }
    own = [
        Place(service, f"{its.host}:{its.port}", tls=callers[service], api_key=api_key)
        for service, its in settings.items()
        if its.port  # 0: any free one
    ]
    targets, drafters = settings["gateway"].targets, settings["target"].drafters
    used = [
        Place(service, address, asked_by, callers[service])
        for service, asked_by, addresses in (
            ("target", "gateway", targets),
            ("draft", "target", drafters),
        )
        for address in split_addresses(addresses)
    ]
    known = {(place.service, place.address) for place in own}
    return own + [place for place in used if (place.service, place.address) not in known]


def _calls(settings: Any) -> ClientTls | None:
    with contextlib.suppress(SettingsError):  # `check_tls` tells it
        return client_tls(settings)
    return None


def check_place(place: Place) -> tuple[list[Finding], bool]:
    """(what is there, whether it is the service that should be)."""
    topic = f"{place.service} {place.address}"
    if not _listens(place.address):
        return [_nobody(place, topic)], False
    with open_blocking_channel(place.address, tls=place.tls) as channel:
        request = health_pb2.HealthCheckRequest(service=FULL_NAMES[place.service])
        try:
            health = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return [_stranger(place, topic, error)], False
        findings = list(_ask(place, channel, topic))
        if health.status != SERVING:
            state = health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)
            text = f"answers, but its health is {state}"
            advice = "it loads, drains, or lacks what is below it; its log says which"
            findings.insert(0, warning(topic, text, advice))
        return findings, True


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S).close()
        return True
    return False


def _nobody(place: Place, topic: str) -> Finding:
    if place.asked_by:
        advice = f"start it, or take it out of the {place.asked_by}'s settings"
        return warning(topic, f"nobody listens; the {place.asked_by} goes on without it", advice)
    host, _, port = place.address.rpartition(":")
    error = why_not(host, int(port))
    if error is not None:
        text = f"nobody listens, and one cannot: {error.strerror}"
        return problem(topic, text, f"set [{place.service}] host and port to what this machine has")
    return ok(topic, "nobody listens; the port is free")


def _tls_advice(place: Place) -> str:
    if place.service == "gateway":
        return "say --tls-ca, and --tls-cert and --tls-key where it asks for them"
    caller = {"target": "gateway", "draft": "target"}[place.service]
    return f"let [{caller}] tls_ca, tls_cert and tls_key fit it"


def _stranger(place: Place, topic: str, error: grpc.RpcError) -> Finding:
    port = f"--{place.service}-port"
    other = f"stop it, or give the {place.service} another port with {port}"
    if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
        return problem(topic, f"a gRPC server that is no {place.service} listens there", other)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        text = f"something listens but does not answer within {TIMEOUT_S:g} s"
        return problem(topic, text, f"if it is the {place.service}, it is stuck: restart it")
    if place.tls and (refusal := explain_refusal(error.details() or "", place.tls)):
        return problem(topic, f"something listens, but {refusal}", _tls_advice(place))
    text = "something that speaks no gRPC, or wants TLS, listens there"
    return problem(topic, text, f"{other}; if it is the {place.service}, {_tls_advice(place)}")


def _ask(place: Place, channel: grpc.Channel, topic: str) -> Iterator[Finding]:
    if place.service == "gateway":
        return _ask_gateway(channel, topic, place.api_key)
    return (_ask_target if place.service == "target" else _ask_draft)(channel, topic)


def _ask_gateway(channel: grpc.Channel, topic: str, api_key: str | None) -> Iterator[Finding]:
    stub, request = inference_pb2_grpc.InferenceStub(channel), inference_pb2.ListModelsRequest()
    try:
        answer = stub.ListModels(request, timeout=TIMEOUT_S, metadata=key_metadata(api_key))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            yield _wants_key(topic, api_key)
            return
        yield _no_status(topic, error)
        return
    for model in answer.models:
        text = f"serves {model.name}, up to {model.max_model_len} tokens"
        if model.ready:
            yield ok(topic, text)
        else:
            advice = "start a target, or look at [gateway] targets"
            yield problem(topic, f"{text}, but no target is ready", advice)


def _wants_key(topic: str, api_key: str | None) -> Finding:
    if api_key is None:
        return ok(topic, "answers, and asks for a key before it says more (OUTRIDER_API_KEY)")
    advice = "give --api-key or OUTRIDER_API_KEY one that its file of keys has"
    return problem(topic, "does not know the API key that was shown", advice)


def _ask_target(channel: grpc.Channel, topic: str) -> Iterator[Finding]:
    request = target_pb2.TargetGetStatusRequest()
    try:
        status = target_pb2_grpc.TargetStub(channel).GetStatus(request, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        yield _no_status(topic, error)
        return
    text = (
        f"{status.state}: {status.model}, {status.load.running} running and "
        f"{status.load.waiting} waiting, {status.pool.used} of {status.pool.total} blocks used "
        f"({status.pool.kv_dtype}, {status.pool.total * status.pool.block_bytes / 2**20:.0f} MiB), "
        f"numerics {status.numerics_id}"
    )
    if status.state == "dead":
        yield problem(topic, text, "a step failed for good: its log says why; restart it")
    elif status.pool.integrity_errors:
        wrong = "; ".join(status.pool.integrity_errors)
        yield problem(topic, f"{text}; the cache's books are wrong: {wrong}", "restart the target")
    else:
        yield ok(topic, text)
    for drafter in status.drafters:
        name = f"{topic} drafter {drafter.address}"
        if drafter.state == "ready":
            round_trip = f"{drafter.round_trip_s * 1e3:.1f} ms round trip"
            yield ok(name, f"ready, {drafter.sequences} sequences, {round_trip}")
        else:
            reason = f" ({drafter.reason})" if drafter.reason else ""
            text = f"unused: {drafter.state}{reason}"
            yield warning(name, text, "the target goes on without it; start it or take it out")
    if not status.drafters:
        yield ok(topic, "has no drafters; nothing is speculated")


def _ask_draft(channel: grpc.Channel, topic: str) -> Iterator[Finding]:
    request = draft_pb2.DraftGetStatusRequest()
    try:
        status = draft_pb2_grpc.DraftStub(channel).GetStatus(request, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        yield _no_status(topic, error)
        return
    model = f" with {status.model} in {status.precision}" if status.model else ""
    what = f"{status.proposer} proposer{model}"
    load = f"{status.load.sessions} of {status.load.capacity} sequences"
    targets = counted(status.streams, "target")
    yield ok(topic, f"{status.state}: {what}, {targets}, {load}")


def _no_status(topic: str, error: grpc.RpcError) -> Finding:
    text = f"healthy, but does not say what it does: {error.code().name}: {error.details()}"
    return problem(topic, text, "it may be of another version: run one version everywhere")
