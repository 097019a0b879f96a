"""Stand-ins for Python's images, made here for an engine that reaches no registry.

Debian's own packages, and what pip needs to work in a build as it works on this machine: its
indexes, its certificates, its folders of wheels. None of it is written down anywhere: the test asks
pip. The image lives in the test's own engine and goes with it.
"""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Protocol

BASE_IMAGE = "outrider-test-base"
COMPILER_IMAGE = "outrider-test-compiler"
_ROOT_FILE_SYSTEM = "outrider-test-rootfs"
_PACKAGES = {
    BASE_IMAGE: "python3-minimal,python3-pip,python3-venv,ca-certificates",
    COMPILER_IMAGE: "python3,g++",
}
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_PASSED_ON = ("index-url", "extra-index-url", "trusted-host", "proxy", "default-timeout")


class _Docker(Protocol):
    def docker(self, *words: str, timeout_s: float = ...) -> str: ...


def make_images(engine: _Docker) -> None:
    """Make BASE_IMAGE, and COMPILER_IMAGE that nothing is installed into, in the engine."""
    for image in _PACKAGES:
        _make_image(engine, image)


def _make_image(engine: _Docker, image: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = folder / "root.tar"
        subprocess.run(
            [
                *("mmdebstrap", "--quiet", "--variant=minbase", f"--include={_PACKAGES[image]}"),
                *("bookworm", str(archive)),
            ],
            check=True,
            stdin=subprocess.DEVNULL,
            timeout=900,
        )
        engine.docker("import", str(archive), _ROOT_FILE_SYSTEM, timeout_s=300)
        archive.unlink()
        lines = [f"FROM {_ROOT_FILE_SYSTEM}", "RUN ln -s /usr/bin/python3 /usr/local/bin/python"]
        lines += _pip_of_this_machine(folder)
        (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
        engine.docker("build", "--quiet", "--tag", image, str(folder), timeout_s=300)


def _pip_of_this_machine(folder: Path) -> list[str]:
    """Dockerfile lines that make pip there do as pip does here; what they copy lies in `folder`."""
    settings = _pip_settings()
    config = {key: settings[key] for key in _PASSED_ON if key in settings}
    if extra := config.pop("extra-index-url", ""):
        config["extra-index-url"] = " ".join(
            each for each in extra.split() if not each.startswith("file:")
        )
    lines = []
    certificates = settings.get("cert") or os.environ.get("SSL_CERT_FILE", "")
    if certificates:
        shutil.copy(certificates, folder / "certificates.crt")
        lines.append(f"COPY certificates.crt {_CERTIFICATES}")
        config["cert"] = _CERTIFICATES
    if wheels := [each for each in settings.get("find-links", "").split() if Path(each).is_dir()]:
        for number, each in enumerate(wheels):
            shutil.copytree(each, folder / f"wheels{number}")
            lines.append(f"COPY wheels{number} {shlex.quote(each)}")
        config["find-links"] = " ".join(wheels)
    parser = configparser.RawConfigParser()
    parser["global"] = config
    with (folder / "pip.conf").open("w") as file:
        parser.write(file)
    return [*lines, "COPY pip.conf /etc/pip.conf"]


def _pip_settings() -> dict[str, str]:
    """What pip is told here, by files and variables; the variables win."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    settings: dict[str, dict[str, str]] = {"global": {}, ":env:": {}}
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in settings:
            settings[section][key] = value.strip("'\"")
    return settings["global"] | settings[":env:"]
