"""Compile every kernel as it is launched, for the GPU generations named on the command line; no GPU is needed.

The interpreter does not know Triton's types. This does, and goes down to machine code.
"""

import re
import subprocess
import sys
import tempfile

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pscore.selection.cuda import triton_kernels as kernels
from pscore.selection.cuda.launches import _DIGITS, _ENTRIES, _TILE

BLOCK = 4096
TYPES = {
    **dict.fromkeys(("rows", "targets", "entries"), "*i8"),
    **dict.fromkeys(("pieces", "parts", "begins", "taken", "search", "bins", "offsets"), "*i64"),
    **dict.fromkeys(("sums", "thresholds"), "*fp64"),
    **dict.fromkeys(("counts", "mask", "unsound", "places", "above"), "*i32"),
    **dict.fromkeys(("clip", "excess", "whole", "values"), "*fp32"),
    "count": "i32",
}
# With Triton 3.6; newer ones need a quarter for histogram, and fewer for emit.
REGISTERS = {"emit": 80, "arrange": 128, "choose": 80, "histogram": 180}


def machine_code(kernel, capability, warps=8, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(code):
    """Registers, and bytes of local memory, which has what is spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def variants():
    shape = {"BLOCK": BLOCK}
    yield "update", kernels.update, 8, {**shape, "PART": 1024}
    yield "settle", kernels.settle, 8, {"TILE": _TILE}
    yield "arrange", kernels.arrange, 8, {"TILE": _TILE}
    yield "emit", kernels.emit, 8, {**shape, "PART": 1024, "TILE": _TILE}
    for shift, bins in _DIGITS:
        yield f"histogram {shift}", kernels.histogram, 8, {"SHIFT": shift, "BINS": bins, **shape}
        yield f"choose {shift}", kernels.choose, 8, {"SHIFT": shift, "BINS": bins}
    for adds in (False, True):
        for absent in ({}, {"offsets": None}):
            yield f"scatter {adds} {absent}", kernels.scatter, 4, {"ADDS": adds, "BLOCK": _ENTRIES, **absent}


def compile_all(capability):
    for name, kernel, warps, constants in variants():
        code = machine_code(kernel, capability, warps, **constants)
        ptx = code.asm["ptx"]
        # A fused multiply-add would round differently from the reference.
        assert not re.search(r"\bfma\.", ptx), name
        registers, spilled = usage(code)
        wide = re.findall(r"(ld|st)\.global\S*\.v([24])\.b(\d+)", ptx)
        found = sorted({(kind, int(count) * int(bits)) for kind, count, bits in wide})
        print(f"sm_{capability} {name}: {registers} registers, {code.metadata.shared} bytes shared, {found}")
        assert spilled == 0, name
        assert registers <= REGISTERS.get(name.split()[0], 64), (name, registers)
        if name == "update":  # memory, momentum, gradient and parameters of each kind
            assert {("ld", 128), ("st", 128)} <= set(found), found


if __name__ == "__main__":
    for named in sys.argv[1:]:
        compile_all(int(named))
