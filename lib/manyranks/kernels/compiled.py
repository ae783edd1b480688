"""Compiles these kernels for a GPU that needn't be here, and says what they need: registers, shared memory, instructions.

Compiling needs its own process, because an interpreted one can't compile:
`python -m manyranks.kernels.compiled 90` prints what `compiled(90)` reads.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from typing import NamedTuple

CAPABILITIES = {80: "A100", 90: "H100", 100: "B200"}
# Arguments by their type in memory; everything else is an integer.
_BF16 = ("x", "out", "a", "b", "q", "k", "v", "grad", "mask", "d_q", "d_k", "d_v", "hidden", "weight")
_FP32 = ("lse", "delta", "chosen", "d_hidden", "d_weight")
_POINTERS = dict.fromkeys(_BF16, "*bf16") | dict.fromkeys(_FP32, "*fp32") | {"targets": "*i64", "scale": "*fp32"}
_ODD = {"A", "GROUP", "shift", "stride", "ignore"}  # integers that needn't be multiples of 16, as sizes and strides are here
_ATTENTION = {"CAUSAL": True, "MASKED": False, "HEAD": 128}
_LOSS = {"TOKENS": 64, "WORDS": 128, "STEP": 64}
_TURNED, _AS_WRITTEN = {"BLOCK": 32, "TURNED": True}, {"BLOCK": 32, "TURNED": False}
_FOUR, _EIGHT = {"num_warps": 4, "num_stages": 1}, {"num_warps": 8, "num_stages": 1}
# What it's called, module, kernel, its constants, and options of its launch: a dict, or the name that the module has for it.
_KERNELS = (
    ("copy", "copying", "copy_kernel", {"BLOCK": 1024}, _FOUR),
    ("transpose", "copying", "transpose_kernel", _TURNED, _FOUR),
    ("transpose, as written", "copying", "transpose_kernel", _AS_WRITTEN, _FOUR),
    ("softmax", "rows", "softmax_kernel", {"BLOCK": 4096}, _EIGHT),
    ("product", "tiles", "product_kernel", {"ROWS": 128, "COLUMNS": 128, "STEP": 32}, "OPTIONS"),
    ("attention", "attention", "forward_kernel", _ATTENTION | {"QUERIES": 128, "KEYS": 64}, "FORWARD"),
    ("gradients of keys", "attention", "keys_kernel", _ATTENTION | {"QUERIES": 64, "KEYS": 64}, "BACKWARD"),
    ("gradients of queries", "attention", "queries_kernel", _ATTENTION | {"QUERIES": 64, "KEYS": 64}, "BACKWARD"),
    ("loss", "losses", "loss_kernel", _LOSS, "OPTIONS"),
    ("gradient of the loss", "losses", "gradient_kernel", _LOSS, "OPTIONS"),
)


class Compiled(NamedTuple):
    """A compiled kernel.

    name: what it's called here.
    constants: the sizes of its tiles.
    warps: warps per block.
    stages: tiles that are read ahead.
    registers: registers per thread.
    spilled: bytes per thread spilled to memory.
    shared: bytes of shared memory per block.
    ptx: the instructions.
    """

    name: str
    constants: dict[str, int]
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int
    ptx: str


def compiled(capability: int = 90) -> dict[str, Compiled]:
    """Compiles this package's kernels for one kind of GPU.

    capability: its compute capability times ten: 80 for an A100, 90 for an H100, 100 for a B200.
    Returns what came out, by name.
    Raises ValueError for another capability.
    """
    if capability not in CAPABILITIES:
        known = ", ".join(f"{number} ({chip})" for number, chip in CAPABILITIES.items())
        raise ValueError(f"capability={capability!r}: give one of {known}")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "manyranks.kernels.compiled", str(capability)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ran.returncode:
        raise RuntimeError(f"the compiler failed for capability {capability}: {ran.stderr.strip()[-500:]}")
    return {row["name"]: Compiled(**row) for row in json.loads(ran.stdout)}


def _compile(called: str, module: str, name: str, constants: dict, options: dict | str, capability: int) -> Compiled:
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    home = import_module(f"manyranks.kernels.{module}")
    kernel, options = getattr(home, name), getattr(home, options) if isinstance(options, str) else options
    signature, fixed, multiples = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], fixed[i,] = "constexpr", constants[argument]
        elif argument.endswith("_strides"):  # the last one is 1
            dims = 4 if module == "attention" else 2
            signature[argument], fixed[i, dims - 1] = ("i32",) * (dims - 1) + ("constexpr",), 1
            multiples |= {(i, dim): [["tt.divisibility", 16]] for dim in range(dims - 1)}
        else:
            number = argument == "scale" and module == "attention"
            signature[argument] = "fp32" if number else _POINTERS.get(argument, "i32")
            multiples |= {} if number or argument in _ODD else {(i,): [["tt.divisibility", 16]]}
    source = ASTSource(kernel, signature, fixed, multiples)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _resources(made.asm["cubin"], triton.knobs.nvidia.cuobjdump.path)
    return Compiled(called, constants, *options.values(), registers, spilled, made.metadata.shared, made.asm["ptx"])


def _resources(binary: bytes, cuobjdump: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps([_compile(*kernel, int(sys.argv[1]))._asdict() for kernel in _KERNELS]))
