"""One compiled form of a kernel: everything that the compiler is told."""

from __future__ import annotations

from dataclasses import dataclass

Constant = int | bool | str


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the types of its arguments, its constants, and how it is scheduled.

    Pointers are aligned to 16 bytes. Integers are never specialised by their value: kernels name
    them in `do_not_specialize`, so that no call compiles a form that is not listed.
    """

    kernel: str
    """module.function below outrider_kernels.triton_ops"""
    types: tuple[tuple[str, str], ...]
    """Run-time arguments in order, in Triton's words: ("x", "*bf16"), ("width", "i32")."""
    constants: tuple[tuple[str, Constant], ...]
    num_warps: int
    num_stages: int = 3
    fuse_multiply_add: bool = True
    """False: a * b + c is rounded twice, as everywhere else."""
    max_registers: int | None = None
    """Of a thread. Unless it is told, NVIDIA's assembler may spill for room for another block."""
    copies_16_bytes: bool = False
    """Its loop must load with asynchronous copies of 16 bytes: tests look for them."""

    @property
    def name(self) -> str:
        """The kernel, what its pointers point to, and its constants."""
        pointers = "/".join(dict.fromkeys(t[1:] for _, t in self.types if t[0] == "*"))
        constants = " ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.kernel.split('.')[-1].removesuffix('_kernel')} {pointers} {constants}"

    @property
    def options(self) -> dict[str, int | bool]:
        """How it is scheduled, in the words of Triton's launches."""
        options: dict[str, int | bool] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fuse_multiply_add,
        }
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options
