"""Every setting of every service: the one source of flags, variables and their documentation.

The command line makes a flag `--max-waiting` and a variable `OUTRIDER_TARGET_MAX_WAITING` from a
field `max_waiting` of TargetSettings. Values are checked once, here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from outrider.text import is_text

DEFAULT_MESSAGE_BYTES = 4 * 1024 * 1024
MIN_MESSAGE_BYTES = 256 * 1024
"""Several frames of the draft protocol, which have a limit of their own."""
LARGEST_MESSAGE_BYTES = 2**30
MAX_THREADS = 4096
"""More than a machine has cores, and few enough to be started."""
MAX_SPIN_US = 10_000
"""Longer than a small model's step: then its threads never sleep."""
MAX_GRAPH_ROWS = 1024
"""More rows keep a device busy for longer than their launches take."""


OTHER_VARIABLES = {
    "OUTRIDER_CACHE": "Folder of models, fetched or converted, and of compiled operations. Unset: "
    "outrider in $XDG_CACHE_HOME or ~/.cache.",
    "OUTRIDER_ADDRESS": "Gateway that generate and chat ask, where --address does not say.",
    "OUTRIDER_API_KEY": "Key that generate and chat show, where --api-key does not say.",
    "OUTRIDER_TLS_CA": "CA of the gateway that generate, chat and doctor ask, where --tls-ca does "
    "not say.",
    "OUTRIDER_TLS_CERT": "Certificate that they show to it, where --tls-cert does not say.",
    "OUTRIDER_TLS_KEY": "Its key, where --tls-key does not say.",
    "OUTRIDER_CONFIG": "Settings file, where --config does not say.",
}
"""Variables that belong to no service, and what they are for."""


LOG_LEVELS = ("debug", "info", "warning", "error")
DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")
KV_DTYPES = ("auto", "int8", "e4m3")
KERNELS = ("auto", "torch", "triton")


class SettingsError(ValueError):
    """A setting outside its limits; the message names it."""


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    addresses: bool = False,
) -> Any:
    """A dataclass field with its documentation and limits."""
    limits = {"low": low, "high": high, "choices": choices, "addresses": addresses}
    return field(default=default, metadata={"help": help} | limits)


class _Checked:
    def __post_init__(self) -> None:
        for name, spec in self.__dataclass_fields__.items():  # type: ignore[attr-defined]
            value, low, high = getattr(self, name), spec.metadata["low"], spec.metadata["high"]
            choices = spec.metadata["choices"]
            if spec.metadata["addresses"]:
                _check_addresses(name, value)
            if isinstance(value, str) and not is_text(value):
                raise SettingsError(f"{name} must be text in UTF-8")
            if choices and value not in choices:
                raise SettingsError(f"{name} must be {' or '.join(choices)}, got {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingsError(f"{name} must be a finite number, got {value:g}")
            if low is not None and value < low:
                raise SettingsError(f"{name} must be at least {low:g}, got {value:g}")
            if high is not None and value > high:
                raise SettingsError(f"{name} must be at most {high:g}, got {value:g}")


def _check_addresses(name: str, addresses: str) -> None:
    """Raise SettingsError for an entry that is no host:port."""
    for address in split_addresses(addresses):
        try:
            check_address(address)
        except AddressError as error:
            raise SettingsError(f"{name} (comma-separated): {error}") from error


class AddressError(ValueError):
    """Nothing can listen there; the message says why."""


def check_address(address: str) -> None:
    """Raise AddressError for what is no host:port, of which gRPC would make something else."""
    host, _, port = address.rpartition(":")
    known = port.isascii() and port.isdigit() and len(port) < 6
    if not host or not known or not 0 < int(port) < 65536:
        raise AddressError(f"must be host:port, got {address!r}")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise AddressError(f"{host!r} cannot be the name of a host") from error


def split_addresses(addresses: str) -> list[str]:
    """Addresses of a comma-separated setting; empty entries are dropped."""
    return [address.strip() for address in addresses.split(",") if address.strip()]


@dataclass(frozen=True)
class GatewaySettings(_Checked):
    """The gateway."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(50051, "Port of the gRPC front.", low=0, high=65535)
    http_host: str = setting("127.0.0.1", "Address of the HTTP front, OpenAI's API.")
    http_port: int = setting(8080, "Its port. 0: any free one. -1: none.", low=-1, high=65535)
    metrics_host: str = setting("127.0.0.1", "Address of metrics and probes over HTTP.")
    metrics_port: int = setting(
        9464,
        "Port of /metrics, /healthz, /readyz. 0: any free one. -1: none.",
        low=-1,
        high=65535,
    )
    model: str = setting("smollm2-135m-instruct", "As the target's; only its tokenizer is used.")
    served_name: str = setting("", "Name that clients use. Empty: the model's own.")
    targets: str = setting("127.0.0.1:50052", "Target addresses, comma-separated.", addresses=True)
    max_concurrent: int = setting(512, "Most requests at once.", low=1)
    request_timeout_s: float = setting(
        3600.0, "Longest time of a request, whatever its client allows. 0: no limit.", low=0
    )
    api_keys: str = setting("", "TOML file of the API keys that may ask. Empty: anybody may.")
    default_timeout_s: float = setting(
        0.0, "Time of a request whose client names no deadline. 0: the longest.", low=0
    )
    max_tokens: int = setting(0, "Most tokens that a request may ask for. 0: no limit.", low=0)
    default_max_tokens: int = setting(
        0, "max_tokens of a request that does not say. 0: up to the context's end.", low=0
    )
    stall_s: float = setting(30.0, "Seconds after which an unread stream is ended.", low=0.1)
    max_prompt_bytes: int = setting(1_048_576, "Most bytes of a prompt's text.", low=1)
    max_message_bytes: int = setting(
        DEFAULT_MESSAGE_BYTES,
        "Largest message, in and out.",
        low=MIN_MESSAGE_BYTES,
        high=LARGEST_MESSAGE_BYTES,
    )
    grace_s: float = setting(30.0, "Seconds that open streams get at shutdown.", low=0)
    tls_cert: str = setting("", "PEM file of its certificate: TLS on its port. Empty: none.")
    tls_key: str = setting("", "PEM file of that certificate's key.")
    tls_client_ca: str = setting("", "PEM file of who signs its clients. Empty: all may call.")
    tls_ca: str = setting("", "PEM file of who signs its targets: TLS to them. Empty: none.")
    log_level: str = setting("info", "debug, info, warning or error.", choices=LOG_LEVELS)
    log_text: bool = setting(False, "Log prompts and answers too. They may be private.")


@dataclass(frozen=True)
class TargetSettings(_Checked):
    """The target service."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(50052, "Port to listen on.", low=0, high=65535)
    metrics_host: str = setting("127.0.0.1", "Address of metrics and probes over HTTP.")
    metrics_port: int = setting(
        9465,
        "Port of /metrics, /healthz, /readyz. 0: any free one. -1: none.",
        low=-1,
        high=65535,
    )
    model: str = setting(
        "smollm2-135m-instruct", "A name, a folder, a .gguf file, or org/name[@revision] on a hub."
    )
    dtype: str = setting(
        "auto",
        "float32; bfloat16, half of it; int8: weights a quarter, the cache bfloat16; int4: weights "
        "a sixth; or auto: on a CPU int8, and int4 where that loses nothing; bfloat16 on a GPU.",
        choices=DTYPES,
    )
    device: str = setting("cpu", "Where the model runs: cpu or cuda:N.")
    kernels: str = setting(
        "auto",
        "What computes: auto, compiled where it can be; torch alone; or triton, a GPU's kernels.",
        choices=KERNELS,
    )
    threads: int = setting(0, "Threads of a step. 0: one a core.", low=0, high=MAX_THREADS)
    spin_us: int = setting(
        5,
        "Microseconds that a thread of a step waits for others before it sleeps. 0: none.",
        low=0,
        high=MAX_SPIN_US,
    )
    graph_rows: int = setting(
        256,
        "Most rows of a step that a GPU replays as a captured graph. 0: no graphs.",
        low=0,
        high=MAX_GRAPH_ROWS,
    )
    kv_tokens: int = setting(0, "Tokens that the paged cache holds. All four 0: 16384.", low=0)
    kv_blocks: int = setting(0, "Its size in blocks of 16 tokens instead.", low=0)
    kv_bytes: int = setting(0, "Its size in bytes instead.", low=0)
    kv_fraction: float = setting(
        0.0, "Its share of the memory that is free once the model is loaded instead.", low=0, high=1
    )
    kv_dtype: str = setting(
        "auto",
        "Of keys and values in it: auto, as the activations are; int8, half of bfloat16; or e4m3, "
        "as small, with Triton's kernels alone.",
        choices=KV_DTYPES,
    )
    prefix_cache: bool = setting(True, "Reuse keys and values of equal beginnings.")
    max_model_len: int = setting(0, "Longest sequence. 0: as the model says.", low=0)
    max_sequences: int = setting(32, "Most sequences in a step.", low=1)
    step_tokens: int = setting(512, "Most tokens in a step, drafts included.", low=16)
    max_waiting: int = setting(256, "Most requests beyond those that can run at once.", low=0)
    max_draft_tokens: int = setting(8, "Most draft tokens of a round.", low=0, high=64)
    max_window: int = setting(16, "Most tokens that a drafter runs ahead.", low=0, high=256)
    drafters: str = setting(
        "127.0.0.1:50053", "Draft service addresses, comma-separated.", addresses=True
    )
    draft_wait_ms: float = setting(50.0, "Longest wait for drafts before a step.", low=0)
    stream_tokens: int = setting(1024, "Most undelivered tokens of a stream.", low=1)
    step_timeout_s: float = setting(
        60.0, "Seconds after which a step that has not returned counts as stuck.", low=0.1
    )
    stall_s: float = setting(30.0, "Seconds after which an unread stream is ended.", low=0.1)
    max_message_bytes: int = setting(
        DEFAULT_MESSAGE_BYTES,
        "Largest message, in and out.",
        low=MIN_MESSAGE_BYTES,
        high=LARGEST_MESSAGE_BYTES,
    )
    grace_s: float = setting(30.0, "Seconds that open streams get at shutdown.", low=0)
    tls_cert: str = setting("", "PEM file of its certificate: TLS on its port. Empty: none.")
    tls_key: str = setting("", "PEM file of that certificate's key.")
    tls_client_ca: str = setting("", "PEM file of who signs its clients. Empty: all may call.")
    tls_ca: str = setting("", "PEM file of who signs its drafters: TLS to them. Empty: none.")
    log_level: str = setting("info", "debug, info, warning or error.", choices=LOG_LEVELS)
    trace_steps: bool = setting(False, "Where traces are on: a span for each step, too.")


@dataclass(frozen=True)
class DraftSettings(_Checked):
    """The draft service."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(50053, "Port to listen on.", low=0, high=65535)
    metrics_host: str = setting("127.0.0.1", "Address of metrics and probes over HTTP.")
    metrics_port: int = setting(
        9466,
        "Port of /metrics, /healthz, /readyz. 0: any free one. -1: none.",
        low=-1,
        high=65535,
    )
    proposer: str = setting("ngram", "How it guesses: ngram or model.", choices=("ngram", "model"))
    model: str = setting("", "The model proposer's; see the target's.")
    dtype: str = setting(
        "auto", "Of the model's weights and cache; see the target's.", choices=DTYPES
    )
    device: str = setting("cpu", "Where the model runs: cpu or cuda:N.")
    kernels: str = setting("auto", "What computes the model; see the target's.", choices=KERNELS)
    threads: int = setting(1, "Threads of a model step. 0: one a core.", low=0, high=MAX_THREADS)
    spin_us: int = setting(
        5, "How long one waits awake, as the target's, in microseconds.", low=0, high=MAX_SPIN_US
    )
    graph_rows: int = setting(
        256, "Of the model's steps on a GPU; see the target's.", low=0, high=MAX_GRAPH_ROWS
    )
    kv_tokens: int = setting(16384, "Tokens that the model's paged cache holds.", low=16)
    kv_dtype: str = setting(
        "auto", "Of keys and values in it; see the target's.", choices=KV_DTYPES
    )
    max_sequences: int = setting(256, "Most open sequences.", low=1)
    max_window: int = setting(32, "Most tokens it runs ahead.", low=1, high=256)
    ngram_min: int = setting(1, "Shortest match of the n-gram proposer.", low=1)
    ngram_max: int = setting(4, "Longest match of the n-gram proposer.", low=1, high=8)
    max_message_bytes: int = setting(
        DEFAULT_MESSAGE_BYTES,
        "Largest message, in and out.",
        low=MIN_MESSAGE_BYTES,
        high=LARGEST_MESSAGE_BYTES,
    )
    grace_s: float = setting(5.0, "Seconds that calls get at shutdown.", low=0)
    tls_cert: str = setting("", "PEM file of its certificate: TLS on its port. Empty: none.")
    tls_key: str = setting("", "PEM file of that certificate's key.")
    tls_client_ca: str = setting("", "PEM file of who signs its clients. Empty: all may call.")
    log_level: str = setting("info", "debug, info, warning or error.", choices=LOG_LEVELS)
