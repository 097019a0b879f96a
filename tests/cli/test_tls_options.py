"""The command line and TLS: certificates are options, and a refusal says which one is missing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.keys import key_hash
from outrider.cli.check_services import Place, check_place
from outrider.cli.check_tls import check_tls
from outrider.cli.demo import free_ports
from outrider.cli.finding import Level
from outrider.cli.main import main
from outrider.cli.stack import Stack, StackError
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings
from outrider.serving.tls import ClientTls, ServerTls
from tests.support.certificates import Authority, Pair
from tests.support.gateways import gateway_with, write_tokenizer_folder
from tests.support.scripted_gateway import scripted_gateway
from tests.support.scripted_target import Script


def ask(address: str, *flags: str, **variables: str) -> Result:
    """`outrider generate`."""
    return CliRunner().invoke(main, ["generate", "--address", address, *flags, "Hi"], env=variables)


def flags_of(pair: Pair, ca: Path) -> list[str]:
    """All three options."""
    return [f"--tls-ca={ca}", f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"]


def test_a_gateway_with_tls_is_asked_with_flags_or_variables(authority: Authority) -> None:
    """The answer is the same; a conversation has the options too."""
    pair, ours = authority.issue("gateway"), authority.issue("me")
    with scripted_gateway(ServerTls(pair.cert, pair.key, authority.ca)) as gateway:
        flags = flags_of(ours, authority.ca)
        assert ask(gateway.address, *flags).stdout == "Good morning\n"
        variables = {
            "OUTRIDER_TLS_CA": str(authority.ca),
            "OUTRIDER_TLS_CERT": str(ours.cert),
            "OUTRIDER_TLS_KEY": str(ours.key),
        }
        assert ask(gateway.address, **variables).stdout == "Good morning\n"
        chat = ["chat", "--address", gateway.address, *flags]
        assert "Good morning" in CliRunner().invoke(main, chat, input="Hi\n").stdout


def test_a_refusal_names_what_is_missing(authority: Authority, tmp_path: Path) -> None:
    """Status 3 and one line: no TLS, no certificate, another CA, a gateway without TLS."""
    pair, other = authority.issue("gateway"), Authority(tmp_path / "theirs")
    with scripted_gateway(ServerTls(pair.cert, pair.key, authority.ca)) as gateway:
        for flags, why in [
            ([], "perhaps it wants TLS, and tls_ca is not set"),
            ([f"--tls-ca={authority.ca}"], "tls_cert is not set"),
            ([f"--tls-ca={other.ca}"], "certificate verify failed"),
        ]:
            result = ask(gateway.address, *flags)
            assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
            assert f"no answer from a gateway at {gateway.address}: " in result.stderr
            assert why in result.stderr
    with scripted_gateway() as gateway:
        assert "it speaks no TLS" in ask(gateway.address, f"--tls-ca={authority.ca}").stderr


def test_options_of_no_use_are_wrong_usage(authority: Authority) -> None:
    """Status 2, by name, before anything is asked."""
    pair, ca = authority.issue("me"), f"--tls-ca={authority.ca}"
    for flags, why in [
        ([ca, f"--tls-cert={pair.cert}"], "tls_cert is set without tls_key"),
        ([f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"], "without tls_ca"),
        ([f"--tls-ca={pair.key}"], "tls_ca holds no certificate"),
        ([f"--tls-ca={pair.key}x"], "tls_ca cannot be read"),
    ]:
        result = ask("127.0.0.1:1", *flags)
        assert result.exit_code == 2 and why in result.stderr


def test_a_child_with_tls_is_known_to_serve(authority: Authority) -> None:
    """`outrider up` asks at the port of metrics and probes, as it has no certificate to show."""
    pair = authority.issue("draft")
    settings = DraftSettings(
        port=free_ports(1)[0],
        metrics_port=0,
        tls_cert=str(pair.cert),
        tls_key=str(pair.key),
        tls_client_ca=str(authority.ca),
    )
    stack = Stack(lambda service, line: None)
    try:
        stack.start("draft", settings)
        stack.wait_healthy(["draft"], timeout_s=15)
        with pytest.raises(StackError, match="tls_key"):
            stack.start("draft", DraftSettings(port=0, tls_cert=str(pair.cert)))
            stack.wait_healthy(["draft"], timeout_s=15)
    finally:
        stack.kill()


def test_up_with_tls_needs_the_port_of_probes(authority: Authority) -> None:
    """It says so before anything starts."""
    pair = authority.issue("gateway")
    command = ["up", f"--gateway-tls-cert={pair.cert}", f"--gateway-tls-key={pair.key}"]
    result = CliRunner().invoke(main, [*command, "--gateway-metrics-port=-1"])
    assert result.exit_code == 2
    assert "gateway-metrics-port must not be -1 with gateway-tls-cert" in result.stderr


def test_doctor_asks_with_the_callers_certificates(authority: Authority) -> None:
    """A service with TLS is looked at as its caller would; a refusal is told with its cause."""
    pair = authority.issue("gateway")
    with scripted_gateway(ServerTls(pair.cert, pair.key, authority.ca)) as gateway:
        for tls, why in [
            (ClientTls(authority.ca, pair.cert, pair.key), "a gRPC server that is no gateway"),
            (ClientTls(authority.ca), "perhaps it wants a certificate"),
            (None, "or wants TLS"),
        ]:
            (finding,), _ = check_place(Place("gateway", gateway.address, tls=tls))
            assert why in finding.text
            assert ("--tls-ca" in finding.advice) is (why != "a gRPC server that is no gateway")


async def test_doctor_and_gateways_that_ask_for_keys(tmp_path: Path) -> None:
    """That it asks for one is no problem; one that it does not know is."""
    entry = f'[[keys]]\nname = "me"\nsha256 = "{key_hash("or-mine").hex()}"\n'
    (tmp_path / "keys.toml").write_text(entry)
    folder = write_tokenizer_folder(tmp_path / "model")
    keys = str(tmp_path / "keys.toml")
    async with gateway_with(folder, Script([5]), api_keys=keys) as (gateway, _):
        for key, level, text in [
            ("or-mine", Level.OK, "serves model"),
            (None, Level.OK, "asks for a key"),
            ("or-other", Level.PROBLEM, "does not know the API key"),
        ]:
            place = Place("gateway", gateway.address, api_key=key)
            (finding,), is_it = await asyncio.to_thread(check_place, place)
            assert is_it and finding.level is level and text in finding.text


def test_doctor_names_files_of_no_use(authority: Authority) -> None:
    """One finding for each service that uses TLS or should."""
    pair, ca = authority.issue("one"), str(authority.ca)
    both = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    good, bad, open_to_all = check_tls(
        {
            "gateway": GatewaySettings(**both, tls_ca=ca),
            "target": TargetSettings(tls_cert=str(pair.cert)),
            "draft": DraftSettings(host="0.0.0.0"),
        }
    )
    assert good.text == "its files can be used: on its port and to those that it calls"
    assert "tls_cert is set without tls_key" in bad.text
    assert "has no TLS" in open_to_all.text and "tls_cert" in open_to_all.advice
    assert list(check_tls({"target": TargetSettings()})) == []


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({"http_host": "0.0.0.0"}, ["0.0.0.0:8080"]),
        ({"host": "::", "http_host": "0.0.0.0"}, [":::50051", "0.0.0.0:8080"]),
        ({"http_host": "0.0.0.0", "http_port": -1}, []),
    ],
)
def test_doctor_looks_at_both_ports_of_a_gateway(
    settings: dict[str, Any], places: list[str]
) -> None:
    """Each one that other machines can reach without TLS, as the gateway warns of each."""
    findings = list(check_tls({"gateway": GatewaySettings(**settings)}))
    assert [finding.text.split()[4].rstrip(",") for finding in findings] == places


def test_doctor_takes_the_options(authority: Authority) -> None:
    """They are for the gateway alone."""
    free = free_ports(3)
    ports = [f"--{s}-port={p}" for s, p in zip(("gateway", "target", "draft"), free, strict=True)]
    command = ["doctor", "--json", f"--tls-ca={authority.ca}", *ports]
    result = CliRunner().invoke(main, command)
    assert json.loads(result.stdout)["findings"]
