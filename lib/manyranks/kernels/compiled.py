"""What Triton's compiler makes of these kernels for a GPU that needn't be here: registers, shared memory, instructions.

The compiler takes a process of its own, for where kernels are interpreted nothing can be compiled:
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
# Arguments by their type in memory; what is left is an integer.
_BF16 = ("x", "out", "a", "b", "q", "k", "v", "grad", "mask", "d_q", "d_k", "d_v", "hidden", "weight")
_FP32 = ("lse", "delta", "chosen", "scales", "d_hidden", "d_weight")
_POINTERS = dict.fromkeys(_BF16, "*bf16") | dict.fromkeys(_FP32, "*fp32") | {"targets": "*i64"}
_ODD = {"A", "GROUP", "shift", "stride"}  # integers that needn't be multiples of 16, as sizes and strides are here
_ATTENTION = {"CAUSAL": True, "MASKED": False, "HEAD": 128}
_LOSS = {"TOKENS": 64, "WORDS": 128, "STEP": 64}
# Module, kernel, its constants, warps of a block, tiles that are read ahead.
_KERNELS = (
    ("copying", "copy_kernel", {"BLOCK": 1024}, 4, 1),
    ("copying", "transpose_kernel", {"BLOCK": 32, "TURNED": True}, 4, 1),
    ("rows", "softmax_kernel", {"BLOCK": 4096}, 8, 1),
    ("tiles", "product_kernel", {"ROWS": 128, "COLUMNS": 128, "STEP": 32}, 8, 3),
    ("attention", "forward_kernel", _ATTENTION | {"QUERIES": 128, "KEYS": 64}, 8, 2),
    ("attention", "keys_kernel", _ATTENTION | {"QUERIES": 64, "KEYS": 64}, 8, 1),
    ("attention", "queries_kernel", _ATTENTION | {"QUERIES": 64, "KEYS": 64}, 8, 1),
    ("losses", "loss_kernel", _LOSS, 8, 2),
    ("losses", "gradient_kernel", _LOSS, 8, 2),
)


class Compiled(NamedTuple):
    """One kernel, compiled.

    kernel: its name.
    constants: the sizes of its tiles.
    warps: of a block.
    stages: tiles that are read ahead.
    registers: of a thread.
    spilled: bytes of a thread that found no register.
    shared: bytes of a block's shared memory.
    ptx: the instructions.
    """

    kernel: str
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
    Returns what came out, by the kernel's name.
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
    return {row["kernel"]: Compiled(**row) for row in json.loads(ran.stdout)}


def _compile(module: str, name: str, constants: dict, warps: int, stages: int, capability: int) -> Compiled:
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(f"manyranks.kernels.{module}"), name)
    signature, fixed, multiples = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], fixed[i,] = "constexpr", constants[argument]
        elif argument.endswith("_strides"):  # the last one is 1
            dims = 4 if module == "attention" else 2
            signature[argument], fixed[i, dims - 1] = ("i32",) * (dims - 1) + ("constexpr",), 1
            multiples |= {(i, dim): [["tt.divisibility", 16]] for dim in range(dims - 1)}
        else:
            signature[argument] = "fp32" if argument == "scale" else _POINTERS.get(argument, "i32")
            multiples |= {(i,): [["tt.divisibility", 16]]} if argument not in _ODD | {"scale"} else {}
    source = ASTSource(kernel, signature, fixed, multiples)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _resources(made.asm["cubin"], triton.knobs.nvidia.cuobjdump.path)
    return Compiled(name, constants, warps, stages, registers, spilled, made.metadata.shared, made.asm["ptx"])


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
