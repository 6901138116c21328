"""Compile every kernel as it is launched, for the GPU generations named on the command line; no GPU is needed.

The interpreter does not know Triton's types. This does, and goes down to machine code.
"""

import re
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pscore.select.kernels import triton_kernels as kernels

INTEGERS = ("counts", "places", "whole", "offsets", "slot_offsets")
COUNTS = ("n", "k", "blocks", "capacity")
SCALARS = ("scale", "decay", "factor", "tolerance", "turn", "keep")


def type_of(name, dtype):
    if name in COUNTS:
        return "i32"
    if name in SCALARS:
        return "fp32"
    if name in ("gradient", "parameters"):
        return f"*{dtype}"
    return "*i32" if name in INTEGERS else "*fp32"


def machine_code(kernel, capability, dtype="fp32", warps=8, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name, dtype) for name in names}
    source = ASTSource(kernel, signature, constants)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_all(capability):
    shape = {"BLOCK": 4096, "SLOT": 256}
    unfed = {"gradient": None, "parameters": None, "momentum": None}
    fed = [
        machine_code(kernels.sift, capability, dtype, OPENING=True, **absent, **shape)
        for dtype in ("fp32", "fp16", "bf16")
        for absent in ({}, {"parameters": None, "momentum": None})
    ]
    read = [machine_code(kernels.sift, capability, OPENING=opening, **unfed, **shape) for opening in (True, False)]
    moved = [machine_code(kernels.emit, capability, **absent, **shape) for absent in ({}, {"masked": None})]
    for opening, remaining in ((True, 0), (True, 3), (False, 1), (False, 0)):
        machine_code(kernels.settle, capability, warps=4, OPENING=opening, REMAINING=remaining, TILE=2048)
    for kernel in fed + read + moved:
        # A fused multiply-add would round differently from the reference.
        assert not re.search(r"\bfma\.", kernel.asm["ptx"]), kernel.metadata.name


if __name__ == "__main__":
    for named in sys.argv[1:]:
        compile_all(int(named))
