"""Compiles a kernel's listed forms without a GPU, and reads from the result what it takes.

Assembler and disassembler are those inside Triton's wheel. The process must not run with
TRITON_INTERPRET=1: there kernels are Python.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider_kernels.triton_ops.variant import Variant

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a block may have, by compute capability."""
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def kernel_of(variant: Variant) -> Any:
    """The jit function that a form is of."""
    module, function = variant.kernel.split(".")
    return getattr(import_module(f"outrider_kernels.triton_ops.{module}"), function)


@dataclass(frozen=True)
class Compiled:
    """A kernel for one chip."""

    kernel: Any
    target: str

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return int(self.kernel.metadata.shared)

    @cached_property
    def _usage(self) -> dict[str, int]:
        if self.target.startswith("gfx"):
            text = self.kernel.asm["amdgcn"]
            found = dict(re.findall(r"\.(\w+_count|private_segment_fixed_size):\s+(\d+)", text))
            return {name: int(value) for name, value in found.items()}
        text = self._tool("cuobjdump", "--dump-resource-usage")
        return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}

    @property
    def registers(self) -> int:
        """Of a thread."""
        return self._usage["vgpr_count" if self.target.startswith("gfx") else "REG"]

    @property
    def spilled(self) -> int:
        """Bytes of a thread's stack on CUDA, registers on AMD; 0: nothing was spilled."""
        return self._usage["vgpr_spill_count" if self.target.startswith("gfx") else "STACK"]

    @cached_property
    def instructions(self) -> Counter[str]:
        """Machine instructions with their modifiers, such as LDGSTS.E.BYPASS.128, and how many."""
        text = self._tool("nvdisasm", "-c")
        return Counter(re.findall(r"^\s+(?:/\*\w+\*/\s+)?(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", text,
                                  re.MULTILINE))  # fmt: skip

    def count(self, prefix: str, part: str = "") -> int:
        """How many instructions begin with a prefix and have a part in their name."""
        return sum(n for op, n in self.instructions.items() if op.startswith(prefix) and part in op)

    def _tool(self, name: str, *options: str) -> str:
        with TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(self.kernel.asm["cubin"])
            environment = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"}
            return subprocess.run(
                [TOOLS / name, *options, cubin],
                capture_output=True,
                text=True,
                check=True,
                env=environment,
            ).stdout


def compile_for(variant: Variant, target: str) -> Compiled:
    """The form as the launcher would get it on a chip of TARGETS."""
    kernel = kernel_of(variant)
    types = dict(variant.types)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*")
    }
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=dict(variant.constants), attrs=aligned
    )
    options = variant.options
    if target.startswith("gfx"):
        options.pop("maxnreg", None)  # NVIDIA's alone
    return Compiled(triton.compile(source, target=TARGETS[target], options=options), target)
