"""Certificates as files: an authority, and what it signs, good or bad in one way."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """Paths of one certificate and its key."""

    cert: Path
    key: Path

    def copy_to(self, other: Pair) -> None:
        """Take the other's place, key first."""
        other.key.write_bytes(self.key.read_bytes())
        other.cert.write_bytes(self.cert.read_bytes())


class Authority:
    """A CA of its own, with its files in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *hosts: str, expired: bool = False) -> Pair:
        """A certificate for these hosts, in files called `name`; else for 127.0.0.1."""
        now = datetime.datetime.now(datetime.UTC)
        past = {"not_before": now - 2 * _DAY, "not_after": now - _DAY}
        made = self._ca.issue_cert(*(hosts or ("127.0.0.1",)), **(past if expired else {}))
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.cert.write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
        made.private_key_pem.write_to_path(pair.key)
        return pair
