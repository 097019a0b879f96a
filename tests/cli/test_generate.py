"""`outrider generate` against a gateway that the test runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures

import click
import grpc
import pytest
from click.testing import CliRunner

from outrider.cli.chat import chat
from outrider.cli.demo import free_ports
from outrider.cli.generate import generate
from protos.outrider.v1 import sampling_pb2
from tests.support.scripted_gateway import ScriptedGateway, scripted_gateway


@pytest.fixture
def gateway() -> Iterator[tuple[ScriptedGateway, str]]:
    """A scripted gateway and its address."""
    with scripted_gateway() as script:
        yield script, script.address


def ask(address: str, *arguments: str, stdin: str | None = None):
    """Run the command."""
    return CliRunner().invoke(generate, ["--address", address, *arguments], input=stdin)


def test_the_text_goes_to_stdout_and_the_rest_to_stderr(gateway) -> None:
    """Standard output is the answer alone."""
    _, address = gateway
    result = ask(address, "Hello")
    assert result.exit_code == 0
    assert result.stdout == "Good morning\n"
    assert "1 of 2 drafted tokens accepted in 1 round]" in result.stderr


def test_json_is_one_object_a_line(gateway) -> None:
    """Chunks with their tokens, then the finish, each on a line of its own."""
    _, address = gateway
    flags = ("--json", "--logprobs", "1", "--prompt-logprobs", "1")
    lines = [json.loads(line) for line in ask(address, *flags, "Hello").stdout.splitlines()]
    assert [line["type"] for line in lines] == ["chunk", "chunk", "finish"]
    assert [t["id"] for line in lines[:2] for t in line["tokens"]] == [5, 6]
    assert lines[1]["tokens"][0]["drafted"] is True
    assert lines[1]["tokens"][0]["logprob"] == -0.5
    assert lines[0]["tokens"][0]["top"] == [[8, -0.125]]
    assert lines[0]["prompt_tokens"] == [{"id": 3}, {"id": 4, "logprob": -2.0, "top": [[9, -1.0]]}]
    assert (lines[2]["reason"], lines[2]["seed"], lines[2]["accepted"]) == ("stop", 7, 1)


def test_json_has_nothing_that_was_not_asked_for(gateway) -> None:
    """No word of log-probabilities without them; what was proposed is drafted or unused."""
    script, address = gateway
    script.unused = {"late": 3}
    first, _, finish = map(json.loads, ask(address, "--json", "Hello").stdout.splitlines())
    assert first == {
        "type": "chunk",
        "index": 0,
        "text": "Good ",
        "tokens": [{"id": 5, "drafted": False}],
    }
    assert finish["prompt_tokens"] == 3
    assert (finish["proposed"], finish["drafted"], finish["unused"]) == (5, 2, {"late": 3})


def test_several_choices_are_shown_one_after_the_other(gateway) -> None:
    """They come side by side, and each is printed whole, under its number, once it has ended."""
    _, address = gateway
    result = ask(address, "--n", "2", "Hello")
    assert result.exit_code == 0
    assert result.stdout == "[choice 1]\nGood morning\n[choice 0]\nGood morning\n"
    assert [line.split(";")[0] for line in result.stderr.splitlines()] == [
        "[choice 1",
        "[choice 0",
    ]


def test_log_probabilities_are_a_line_a_token(gateway) -> None:
    """Of the prompt and the answer, with what each token reads like; the text stays alone."""
    _, address = gateway
    result = ask(address, "--logprobs", "1", "--prompt-logprobs", "1", "Hello")
    assert result.stdout == "Good morning\n"
    rows = [line.split() for line in result.stderr.splitlines()]
    assert rows[:-1] == [
        ["prompt", "logprob", "token"],
        ["3", "-", "'<3>'"],
        ["4", "-2.0000", "'<4>'", "'<9>'", "-1.0000"],
        ["answer", "logprob", "token"],
        ["5", "-0.2500", "'<5>'", "'<8>'", "-0.1250"],
        ["6", "-0.5000", "'<6>'"],
    ]


def test_every_flag_reaches_the_request(gateway) -> None:
    """Sampling, stopping and speculation flags are in the message; a chat carries its turns."""
    script, address = gateway
    result = ask(
        address,
        *("--system", "Be brief.", "--temperature", "0.8", "--top-p", "0.95", "--top-k", "40"),
        *("--seed", str(2**64 - 1), "--max-tokens", "9", "--stop", "x", "--stop", "y"),
        *("--speculation", "fixed", "--max-draft-tokens", "3", "--logprobs", "2"),
        *("--prompt-logprobs", "0", "--n", "3", "Hi"),
    )
    assert result.exit_code == 0, result.output
    request = script.request
    assert [(m.role, m.content) for m in request.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert request.sampling.temperature == pytest.approx(0.8)
    assert request.sampling.top_k == 40
    assert request.sampling.seed == 2**64 - 1
    assert (request.stopping.max_tokens, list(request.stopping.stop)) == (9, ["x", "y"])
    assert request.speculation.mode == sampling_pb2.SpeculationParams.MODE_FIXED
    assert request.speculation.max_draft_tokens == 3
    assert (request.logprobs, request.n) == (2, 3)
    assert request.HasField("prompt_logprobs") and request.prompt_logprobs == 0


def test_without_a_seed_the_gateway_draws_one(gateway) -> None:
    """No seed is sent unless it was given; 0 is a seed like any other."""
    script, address = gateway
    ask(address, "Hi")
    assert not script.request.sampling.HasField("seed")
    ask(address, "--seed", "0", "Hi")
    assert script.request.sampling.HasField("seed")


@pytest.mark.parametrize("flag", ["--seed", "--max-tokens", "--n", "--stop-token-id"])
def test_a_number_that_no_message_can_carry(flag: str) -> None:
    """Wrong usage, by the flag's name, before anybody is asked."""
    result = ask("127.0.0.1:1", f"{flag}=-1", "Hi")
    assert result.exit_code == 2
    assert f"{flag} must be between 0 and" in result.stderr


def test_a_prompt_from_standard_input(gateway) -> None:
    """`-` reads it, newlines and all."""
    script, address = gateway
    ask(address, "-", stdin="two\nlines\n")
    assert script.request.text == "two\nlines\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 4),
        (grpc.StatusCode.NOT_FOUND, 4),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 5),
        (grpc.StatusCode.UNAVAILABLE, 3),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 6),
        (grpc.StatusCode.INTERNAL, 1),
    ],
)
def test_refusals_have_an_exit_status_each(gateway, code: grpc.StatusCode, status: int) -> None:
    """Scripts can tell a bad request from a busy gateway; the message is the gateway's."""
    script, address = gateway
    script.error = code
    result = ask(address, "Hi")
    assert result.exit_code == status
    assert "as scripted" in result.stderr


def test_through_a_pipe_every_character_is_as_the_model_made_it(gateway) -> None:
    """Tabs and control characters among them: only a terminal has to be kept from them."""
    script, address = gateway
    script.words = ("a\tb\rc", "\x1b[31m\x07")
    assert ask(address, "Hi").stdout == "a\tb\rc\x1b[31m\x07\n"


def test_no_gateway_there() -> None:
    """Nobody listens: exit status 3, the address, and what would help."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    result = ask(address, "Hi")
    assert result.exit_code == 3
    message = f"Error: no answer from a gateway at {address}; is `outrider up` running?\n"
    assert result.stderr == message


def test_a_time_that_is_over_is_told_on_a_line_of_its_own(gateway) -> None:
    """Behind what came until then, with the flag that gives more."""
    script, address = gateway
    script.hang = True
    result = ask(address, "--timeout", "0.5", "Hi")
    assert result.exit_code == 6
    assert result.stdout == "Good \n"
    assert result.stderr == "Error: out of time after 0.5 s (--timeout)\n"


def test_a_server_that_is_no_gateway() -> None:
    """Such as a target: the same status as nobody there, and words that help."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        result = ask(address, "Hi")
    finally:
        server.stop(0).wait(5)
    assert result.exit_code == 3
    assert f"what answers at {address} is no gateway" in result.stderr


def test_what_a_gateway_says_of_an_error_is_one_line(gateway) -> None:
    """It may repeat what somebody else has sent."""
    script, address = gateway
    script.error, script.details = grpc.StatusCode.INTERNAL, "\x1b[31mred\nError: fake"
    assert ask(address, "Hi").stderr == "Error: INTERNAL: \\x1b[31mred\\nError: fake\n"


@pytest.mark.parametrize("command", [generate, chat])
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *((flag, "\udce9") for flag in ("--system", "--model")),
        *(("--timeout", value) for value in ("0", "-1", "inf", "nan", "1e300", "x")),
        *(
            ("--address", value)
            for value in ("", "host", ":1", "h:", "h:0", "h:99999", "h:" + "1" * 5000, "a..b:1")
        ),
    ],
)
def test_values_that_none_can_mean(command: click.Command, flag: str, value: str) -> None:
    """They are usage errors that name the flag, without a call."""
    arguments = [f"{flag}={value}", *(["Hi"] if command is generate else [])]
    result = CliRunner().invoke(command, arguments, input="")
    assert (result.exit_code, result.exception.code) == (2, 2)
    assert f"Invalid value for '{flag}'" in result.stderr


@pytest.mark.parametrize("arguments", [["--stop=\udce9", "Hi"], ["\udce9"]])
def test_bytes_that_are_no_text(arguments: list[str]) -> None:
    """Likewise, wherever they are."""
    result = CliRunner().invoke(generate, arguments)
    assert result.exit_code == 2
    assert "must be text in UTF-8" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--seed", "-1"],
        ["--seed", str(2**64)],
        ["--max-tokens", "-1"],
        ["--n", "-1"],
        ["--prompt-logprobs", str(2**32)],
    ],
)
def test_numbers_that_the_wire_cannot_carry(flags: list[str]) -> None:
    """They are usage errors that name the flag, without a call."""
    result = CliRunner().invoke(generate, [*flags, "Hi"])
    assert result.exit_code == 2
    assert flags[0] in result.output


def test_a_key_is_shown_with_every_call(gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the flag or the variable, also when the text of a token is asked for."""
    script, address = gateway
    assert ask(address, "--api-key", "flag", "--logprobs", "0", "Hello").exit_code == 0
    assert len(script.keys) > 1 and set(script.keys) == {"Bearer flag"}
    monkeypatch.setenv("OUTRIDER_API_KEY", "variable")
    for command in (generate, chat):
        arguments = ["Hello"] if command is generate else []
        result = CliRunner().invoke(command, ["--address", address, *arguments], input="Hello\n")
        assert result.exit_code == 0, result.output
        assert script.keys[-1] == "Bearer variable"
    monkeypatch.setenv("OUTRIDER_API_KEY", "")  # as if it were not set
    assert ask(address, "Hello").exit_code == 0
    assert script.keys[-1] is None


def test_what_can_be_no_key_is_not_repeated(gateway) -> None:
    """A key that was pasted wrong is wrong usage, and still a secret."""
    _, address = gateway
    result = ask(address, "--api-key", "s3cret\n", "Hello")
    assert result.exit_code == 2
    assert "printable ASCII" in result.stderr and "s3cret" not in result.output


def test_a_missing_key_is_a_refusal(gateway) -> None:
    """The status is that of a refused request, and the words are the gateway's,
    and how to give a key here."""
    script, address = gateway
    script.error, script.details = grpc.StatusCode.UNAUTHENTICATED, "no key"
    result = ask(address, "Hello")
    assert result.exit_code == 4
    assert "UNAUTHENTICATED: no key; here by OUTRIDER_API_KEY or --api-key" in result.stderr
