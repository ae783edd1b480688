"""Techniques and trainer say where they make tensors: on a GPU, one on the CPU would go over gloo, or not at all."""

import ast
from pathlib import Path

LIB = Path(__file__).parents[2] / "lib" / "manyranks"
MAKE = {
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "linspace",
    "eye",
    "rand",
    "randn",
    "randint",
    "randperm",
}
# Modules' own parameters and buffers, which go where the module goes; and a model of one number that only sleeps.
ELSEWHERE = {"dispatch.py": 3, "router.py": 3}


def silent(source: str) -> list[str]:
    """The calls that make a tensor and do not say on which device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func).partition("torch.")[::2] in {("", name) for name in MAKE}]
    return [ast.unparse(call) for call in named if not {"device", "out"} & {word.arg for word in call.keywords}]


def test_every_tensor_that_is_made_says_on_which_device():
    files = [path for name in ("parallel", "training") for path in sorted((LIB / name).rglob("*.py"))]
    found = {path.name: calls for path in files if (calls := silent(path.read_text()))}
    assert {name: len(calls) for name, calls in found.items()} == ELSEWHERE, found


def test_the_check_sees_them():
    assert silent("x = torch.ones(3)\ny = torch.ones(3, device=x.device)\nz = x.new_ones(3)") == ["torch.ones(3)"]
