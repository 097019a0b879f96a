"""TLS for every hop: PEM files that are checked at the start and read again when they change.

A pair that does not fit, or a file that is being written, is not taken: what was good stays, and
one line says why. Open connections keep what they began with. Knows nothing of services.
"""

from __future__ import annotations

import errno
import ssl
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import structlog

from outrider.serving.settings import SettingsError

log = structlog.get_logger(__name__)

_BEGIN, _END = b"-----BEGIN ", b"-----END "
_UNFIT = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")

_MAX_PEM_BYTES = 4 * 1024 * 1024
"""All authorities of a system are a tenth of it."""

_Signature = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Pems:
    """What the files held when they were read together and found good."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    context: ssl.SSLContext
    """The same for a server that is not gRPC's."""


class _Files:
    """A pair of certificate and key, and a CA; one of the two may be left out."""

    def __init__(self, pair: tuple[Path, Path] | None, ca_setting: str, ca: Path | None) -> None:
        """ca_setting: how messages call the CA. Raises SettingsError."""
        self._ca_setting = ca_setting
        self._paths: dict[str, Path] = {} if ca is None else {ca_setting: ca}
        if pair is not None:
            self._paths |= {"tls_cert": pair[0], "tls_key": pair[1]}
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._pems = self._read()

    def current(self) -> _Pems:
        """What a new connection uses; the same object until the files have changed. Any thread."""
        with self._lock:
            signature = self._signature()
            if signature == self._seen:
                return self._pems
            pems, fault = None, ""
            try:
                pems = self._read()
            except SettingsError as error:
                fault = str(error)
            if self._signature() != signature:
                return self._pems  # somebody is writing: the next connection looks again
            self._seen = signature
            if pems is None:
                log.warning("new TLS files are not taken, the old ones stay", reason=fault)
            else:
                self._pems = pems
                log.info("new TLS files are taken", files=sorted(self._paths))
            return self._pems

    def _signature(self) -> _Signature:
        """Differs when a file has been written, replaced, or made readable."""
        return tuple(_look(path) for path in self._paths.values())

    def _read(self) -> _Pems:
        texts = {name: _read_pem(name, path) for name, path in self._paths.items()}
        for name in texts.keys() - {"tls_key"}:
            _check_certificates(name, texts[name])
        ca = texts.get(self._ca_setting)
        context = _server_context(verifies=ca is not None)
        if "tls_cert" in texts:
            _load_pair(context, self._paths["tls_cert"], self._paths["tls_key"])
        if ca is not None:
            context.load_verify_locations(cadata=_as_text(ca))
        return _Pems(texts.get("tls_cert"), texts.get("tls_key"), ca, context)


class ServerTls:
    """A server's certificate, and the CA of the clients that it lets in."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """client_ca: None lets in every client. Raises SettingsError."""
        self.wants_client_certificate = client_ca is not None
        self.files = _Files((cert, key), "tls_client_ca", client_ca)


class ClientTls:
    """The CA that a client trusts, and the certificate that it shows to servers that ask."""

    def __init__(self, ca: Path, cert: Path | None = None, key: Path | None = None) -> None:
        """Raises SettingsError."""
        self.has_certificate = cert is not None and key is not None
        self.files = _Files(pair_of(cert, key), "tls_ca", ca)


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """For gRPC's port. Each handshake looks whether the files have changed."""
    taken = tls.files.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal taken
        current = tls.files.current()
        if current is taken:
            return None  # as before
        taken = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(taken),
        fetch,  # type: ignore[arg-type]  # the stubs do not know that None keeps what there is
        require_client_authentication=tls.wants_client_certificate,
    )


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """For one new channel, from the files as they are now."""
    pems = tls.files.current()
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


def ssl_context(tls: ServerTls) -> ssl.SSLContext:
    """For servers on Python's own sockets. Each handshake looks whether the files have changed.

    Protocols (ALPN) are the caller's to set before the first connection.
    """
    context = _server_context(verifies=tls.wants_client_certificate)

    def use_current(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = tls.files.current().context

    context.sni_callback = use_current  # called in every handshake, be there a name or not
    return context


def pair_of(cert: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """Both or neither. Raises SettingsError for one alone."""
    if cert is not None and key is not None:
        return cert, key
    if cert is not None or key is not None:
        there, missing = ("tls_cert", "tls_key") if key is None else ("tls_key", "tls_cert")
        raise SettingsError(f"{there} is set without {missing}: a certificate needs both")
    return None


def _server_context(*, verifies: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED if verifies else ssl.CERT_NONE
    # A resumed session would not meet a CA or a certificate that has been replaced.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context


def _configuration(pems: _Pems) -> grpc.ServerCertificateConfiguration:
    pair = cast(tuple[bytes, bytes], (pems.key, pems.cert))  # a server has them
    return grpc.ssl_server_certificate_configuration([pair], pems.ca)


def _look(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read_pem(name: str, path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for its writer
            raise OSError(errno.EINVAL, "not a regular file")
        with path.open("rb") as file:
            text = file.read(_MAX_PEM_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no path"
        raise SettingsError(f"{name} cannot be read: {reason}") from error
    if len(text) > _MAX_PEM_BYTES:
        raise SettingsError(f"{name} is larger than {_MAX_PEM_BYTES} bytes")
    if _BEGIN not in text or text.count(_BEGIN) != text.count(_END):
        raise SettingsError(f"{name} is no whole PEM file")
    return text


def _as_text(pem: bytes) -> str:
    return pem.decode("ascii", "replace")


def _check_certificates(name: str, pem: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_as_text(pem))
    except ssl.SSLError as error:
        raise SettingsError(f"{name} holds no certificate that can be read") from error


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    def refuse() -> str:
        raise SettingsError("tls_key has a passphrase, which nobody could type")

    try:
        context.load_cert_chain(cert, key, password=refuse)
    except ssl.SSLError as error:
        if error.reason in _UNFIT:
            raise SettingsError("tls_key does not fit tls_cert") from error
        if error.reason:  # such as a key that is too short
            reason = error.reason.lower().replace("_", " ")
            raise SettingsError(f"tls_cert and tls_key cannot be used: {reason}") from error
        raise SettingsError("tls_key holds no private key that can be read") from error
    except OSError as error:
        raise SettingsError(f"tls_cert or tls_key cannot be read: {error.strerror}") from error
