"""What `outrider doctor` says of this machine: packages, CPU, threads, operations, GPU,
environment.

Works without torch, and says what is missing without it. Knows nothing of services and models.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.cli.finding import Finding, ok, problem, warning
from outrider.cli.service_links import ADVICE, links_told
from outrider.serving.cores import usable_cores
from outrider.serving.settings import DraftSettings, TargetSettings
from outrider_kernels.native_build import Unavailable, prospect

# Package, the extra that brings it (None: the base install), and whether it may be missing.
PACKAGES: tuple[tuple[str, str | None, bool], ...] = (
    ("grpcio", None, False),
    ("protobuf", None, False),
    ("tokenizers", "gateway", False),
    ("torch", "target", False),
    ("numpy", "target", False),
    ("safetensors", "target", False),
    ("transformers", None, True),
    ("triton", None, True),
)
CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
# What services set for themselves, and what may be set on purpose.
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "MKL_CBWR")


def check_machine(
    target: TargetSettings,
    draft: DraftSettings | None,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """Everything that can be said without asking a service."""
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from check_packages()
    yield _cpu()
    yield _threads(target, draft)
    yield from _operations(target, draft)
    yield _gpu(_import_torch())
    yield _environment(environment)
    links = links_told(environment)
    if links:
        yield problem("environment", links, ADVICE)


def check_packages(
    packages: Sequence[tuple[str, str | None, bool]] = PACKAGES,
) -> Iterator[Finding]:
    """Their versions; those that are missing or too old."""
    minimums = _minimums()
    for name, extra, optional in packages:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if optional:
                yield ok(name, "not installed, not needed")
            else:
                wanted = f"outrider[{extra}]" if extra else "outrider"
                text = f"not installed: `outrider {extra or ''}".rstrip() + "` cannot run"
                yield problem(name, text, f"run: pip install '{wanted}'")
            continue
        minimum = minimums.get(name, "0")
        if _number(version) < _number(minimum):
            advice = f"run: pip install '{name}>={minimum}'"
            yield problem(name, f"{version} is older than {minimum}", advice)
        else:
            yield ok(name, version)


def _minimums() -> dict[str, str]:
    """Lowest versions, from the installed package's own requirements; none when it is a checkout
    that was never installed."""
    try:
        requirements = importlib.metadata.requires("outrider") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    matches = [re.match(r"([\w.-]+)>=([\d.]+)", requirement) for requirement in requirements]
    return {match[1]: match[2] for match in matches if match}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _cpu() -> Finding:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ok("cpu", f"{platform.machine()}; its features cannot be read here")
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    flags = facts.get("flags", facts.get("Features", "")).split()
    have = [name for name in CPU_FEATURES if name in flags]
    text = (
        f"{facts.get('model name', platform.machine())}: {', '.join(have) or 'no known features'}"
    )
    if platform.machine() == "x86_64" and "avx2" not in have:
        return warning("cpu", text, "without AVX2 expect a small part of the usual speed")
    return ok("cpu", text)


def _threads(target: TargetSettings, draft: DraftSettings | None) -> Finding:
    cores = usable_cores()
    wanted = target.threads or cores
    helper = 0
    if draft is not None and draft.proposer == "model":
        helper = draft.threads or cores
    text = f"{cores} cores to use; a target step takes {wanted} threads"
    if helper:
        text += f", a draft step {helper}"
    if wanted > cores:
        return warning("threads", text, f"set --target-threads={cores}: more only take turns")
    if helper > cores:
        return warning("threads", text, "set --draft-threads=1: more only take turns")
    return ok("threads", text)


def _operations(target: TargetSettings, draft: DraftSettings | None) -> Iterator[Finding]:
    """Whether models on the CPU have the fast ones, unless none is to use them."""
    models: list[TargetSettings | DraftSettings] = [target]
    if draft is not None and draft.proposer == "model":
        models.append(draft)
    if not any(each.device == "cpu" and each.kernels == "auto" for each in models):
        return
    try:
        yield ok("operations", prospect())
    except Unavailable as reason:
        text = f"plain torch, which is right but slow: {reason}"
        yield warning("operations", text, "install a C++ compiler, such as g++")


def _import_torch() -> Any:
    try:
        import torch
    except (
        ImportError,
        OSError,
    ):  # missing, or its libraries do not load; `check_packages` says it
        return None
    return torch


def _gpu(torch: Any) -> Finding:
    present = Path("/dev/nvidia0").exists()
    if torch is None:
        return ok("gpu", "cannot be asked without torch")
    if torch.cuda.is_available():
        names = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            names.append(f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        return ok("gpu", "; ".join(names))
    if present:
        text = f"there is one, but torch {torch.__version__} cannot use it"
        return warning("gpu", text, "install a build of torch with CUDA that fits the driver")
    return ok("gpu", "none; everything runs on the CPU")


def _environment(environment: Mapping[str, str]) -> Finding:
    given = {name: environment[name] for name in VARIABLES if name in environment}
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    if given.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        advice = "unset it: waiting threads that spin slow the other services down several times"
        return warning("environment", text, advice)
    if "MKL_NUM_THREADS" in given:
        advice = "unset it: it overrides the threads that the services ask for"
        return warning("environment", text, advice)
    return ok("environment", text or "no OpenMP or MKL variables; the services set their own")
