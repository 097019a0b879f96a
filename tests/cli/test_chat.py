"""`outrider chat`: commands and turns, from a pipe and on a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from outrider.cli.chat import chat
from outrider.cli.chat_session import ChatSession, CommandError, Quit
from protos.outrider.v1 import sampling_pb2
from tests.support.scripted_gateway import ScriptedGateway, scripted_gateway

GREEN = "\x1b[32m"


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    """A scripted gateway."""
    with scripted_gateway() as script:
        yield script


def talk(gateway: ScriptedGateway, *lines: str, arguments: tuple[str, ...] = ()) -> Result:
    """The program with these lines on standard input."""
    command = ["--address", gateway.address, *arguments]
    return CliRunner().invoke(chat, command, input="".join(f"{line}\n" for line in lines))


def turns(gateway: ScriptedGateway) -> list[tuple[str, str]]:
    """Of the last request."""
    return [(message.role, message.content) for message in gateway.request.chat.messages]


def test_answers_become_turns(gateway: ScriptedGateway) -> None:
    """Standard output is the answers alone; each request carries the conversation before it."""
    result = talk(gateway, "hello", "", "and now?", arguments=("--system", "Be brief."))
    assert result.exit_code == 0
    assert result.stdout == "Good morning\nGood morning\n"
    assert "1 of 2 drafted tokens accepted in 1 round; seed 7" in result.stderr
    assert turns(gateway) == [
        ("system", "Be brief."),
        ("user", "hello"),
        ("assistant", "Good morning"),
        ("user", "and now?"),
    ]


def test_settings_reach_the_next_request(gateway: ScriptedGateway) -> None:
    """/seed, /temperature, /drafts and /system change the request; /reset forgets the turns."""
    commands = ["/seed 9", "/temperature 0.5", "/drafts 3", "/system Sing.", "/reset"]
    assert talk(gateway, "one", *commands, "two").exit_code == 0
    first, second = gateway.requests
    assert not first.sampling.HasField("seed")
    assert first.speculation.mode == sampling_pb2.SpeculationParams.MODE_AUTO
    assert (second.sampling.seed, second.sampling.temperature) == (9, 0.5)
    assert second.speculation.mode == sampling_pb2.SpeculationParams.MODE_FIXED
    assert second.speculation.max_draft_tokens == 3
    assert turns(gateway) == [("system", "Sing."), ("user", "two")]
    talk(gateway, "/seed off", "x", arguments=("--seed", "4", "--drafts", "off"))
    assert not gateway.request.sampling.HasField("seed")
    assert gateway.request.speculation.mode == sampling_pb2.SpeculationParams.MODE_OFF


def test_stats_save_help_and_quit(gateway: ScriptedGateway, tmp_path: Path) -> None:
    """/stats adds up; /save writes what was said; nothing behind /quit is asked."""
    file = tmp_path / "talk.json"
    commands = ["/stats", f"/save {file}", "/help", "//slash", "/quit", "never asked"]
    result = talk(gateway, "hello", *commands)
    assert result.exit_code == 0
    assert "1 answer, 2 tokens" in result.stderr
    assert "1 of 2 drafted tokens accepted (50%)" in result.stderr
    assert "/drafts on|off|K" in result.stderr
    saved = json.loads(file.read_text())
    assert saved["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Good morning"},
    ]
    assert saved["totals"]["accepted"] == 1
    assert [request.chat.messages[-1].content for request in gateway.requests] == [
        "hello",
        "/slash",
    ]


def test_drafts_that_were_not_used_are_added_up_and_saved(
    gateway: ScriptedGateway, tmp_path: Path
) -> None:
    """By reason, over all answers."""
    gateway.unused = {"late": 2, "rejected": 1}
    file = tmp_path / "talk.json"
    result = talk(gateway, "hello", "and now?", "/stats", f"/save {file}")
    assert result.exit_code == 0
    assert "of 10 proposed unused: late 4, rejected 2" in result.stderr
    assert json.loads(file.read_text())["totals"]["unused"] == {"late": 4, "rejected": 2}


def test_a_file_that_cannot_be_written_is_told_and_not_left(tmp_path: Path) -> None:
    """A disk that is full, say: no half of a file, and the conversation is as it was."""
    session, file = ChatSession(turns=[("user", "hello")]), tmp_path / "talk.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(CommandError, match="cannot save to .*talk.json: File too large"):
            session.command(f"/save {file}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not file.exists()
    assert session.turns == [("user", "hello")]
    session.command(f"/save {file}")
    assert json.loads(file.read_text())["messages"][0]["content"] == "hello"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/tempratur 1", "did you mean /temperature?"),
        ("/zzz", "/help lists all"),
        ("/temperature hot", "a number from 0 to 100"),
        ("/temperature nan", "a number from 0 to 100"),
        ("/seed -1", "a seed is a number"),
        (f"/seed {2**64}", "a seed is a number"),
        ("/seed " + "9" * 5000, "a seed is a number"),
        ("/drafts maybe", "on, off or a number"),
        ("/drafts " + "9" * 5000, "on, off or a number"),
        ("/save a\0b", "cannot save to a.b: embedded null byte"),
        ("/save ~nobody-of-this-name/x", "cannot save to ~nobody-of-this-name/x"),
        ("/save", "name a file"),
        ("/save /no/such/folder/x", "No such file"),
    ],
)
def test_mistakes_in_commands(line: str, message: str) -> None:
    """Each says what would have been right, and changes nothing."""
    session = ChatSession()
    with pytest.raises(CommandError, match=message.replace("?", r"\?")):
        session.command(line)
    assert session == ChatSession()


def test_save_never_overwrites(tmp_path: Path) -> None:
    """A file that is there stays as it is."""
    file = tmp_path / "mine"
    file.write_text("precious")
    with pytest.raises(CommandError, match="exists"):
        ChatSession().command(f"/save {file}")
    assert file.read_text() == "precious"
    with pytest.raises(Quit):
        ChatSession().command("/quit")


def test_without_a_terminal_the_first_failure_ends_it(gateway: ScriptedGateway) -> None:
    """The exit status is that of `generate`, and the rest of the input is not asked."""
    gateway.error = grpc.StatusCode.RESOURCE_EXHAUSTED
    result = talk(gateway, "one", "two")
    assert (result.exit_code, len(gateway.requests)) == (5, 1)
    assert "as scripted" in result.stderr
    assert talk(gateway, "/nonsense", "two").exit_code == 2


class Terminal:
    """The program on a pseudo-terminal."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "outrider", "chat", "--address", address]
        self._screen, inside = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(inside)
        self.output = ""
        self._seen = 0

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._screen, keys.encode())

    def wait_for(self, text: str, timeout_s: float = 15.0) -> None:
        """Until the text appears behind what was waited for before."""
        deadline = time.monotonic() + timeout_s
        while (at := self.output.find(text, self._seen)) < 0:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} never came: {self.output!r}"
            if select.select([self._screen], [], [], left)[0]:
                with contextlib.suppress(OSError):  # the program has ended
                    self.output += os.read(self._screen, 65536).decode(errors="replace")
        self._seen = at + len(text)

    def close(self) -> None:
        """The program is gone after this."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._screen)


def _take_terminal() -> None:
    """Make standard input the terminal that sends Ctrl-C."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.timeout(60)
def test_on_a_terminal(gateway: ScriptedGateway) -> None:
    """Drafted text is green; Ctrl-C cancels the answer and the program goes on with what was said;
    Ctrl-C at the prompt drops the line; a failure is told; Ctrl-D leaves with status 0."""
    terminal = Terminal(gateway.address)
    try:
        terminal.wait_for("> ")
        terminal.type("hello\r")
        terminal.wait_for("Good ")
        terminal.wait_for(f"{GREEN}morning")
        terminal.wait_for("[stop; 2 tokens")
        gateway.hang = True
        terminal.wait_for("> ")
        terminal.type("again\r")
        terminal.wait_for("Good ")
        terminal.type("\x03")
        terminal.wait_for("[stopped]")
        assert gateway.cancelled.wait(15)
        gateway.hang = False
        terminal.wait_for("> ")
        # A signal that comes just before readline waits for keys, it sees at the next key only.
        terminal.type("half a line")
        terminal.wait_for("half a line")
        time.sleep(0.1)
        terminal.type("\x03")
        terminal.wait_for("> ")
        terminal.type("third\r")
        terminal.wait_for("[stop; 2 tokens")
        assert turns(gateway)[2:] == [
            ("user", "again"),
            ("assistant", "Good "),
            ("user", "third"),
        ]
        gateway.error = grpc.StatusCode.UNAVAILABLE
        terminal.type("fourth\r")
        terminal.wait_for("no answer from a gateway")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()


@pytest.mark.timeout(60)
def test_a_model_does_not_steer_the_terminal(gateway: ScriptedGateway) -> None:
    """Its control characters are shown, not sent; newlines and all letters stay."""
    gateway.words = ("a\n\u00a0b ", "\x1b]0;pwn\x07\x9b1m\rend")
    terminal = Terminal(gateway.address)
    try:
        terminal.wait_for("> ")
        terminal.type("hello\r")
        terminal.wait_for("a\r\n\u00a0b ")
        terminal.wait_for("\\x1b]0;pwn\\x07\\x9b1m\\rend")
    finally:
        terminal.close()


def test_an_interrupt_without_a_terminal_ends_it(gateway: ScriptedGateway) -> None:
    """While it waits for a line, SIGINT ends the program with status 130."""
    command = [sys.executable, "-m", "outrider", "chat", "--address", gateway.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("hello\n")
            process.stdin.flush()
            assert process.stdout.readline() == "Good morning\n"
            time.sleep(0.3)  # until it reads again
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
        finally:
            process.kill()
