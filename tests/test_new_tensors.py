"""No tensor takes its dtype or device from torch's defaults, which belong to the program that imports this library."""

import ast
from pathlib import Path

import psclient
import pscore
import psservice

MAKERS = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
}


def makes_a_tensor(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
    )


def test_every_new_tensor_says_its_dtype_and_its_device():
    silent = []
    for package in (pscore, psclient, psservice):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if makes_a_tensor(node) and not {"dtype", "device"} <= {each.arg for each in node.keywords}:
                    silent.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not silent


def test_the_check_finds_one():
    [found] = [node for node in ast.walk(ast.parse("x = torch.empty(3, device=d)")) if makes_a_tensor(node)]
    assert [each.arg for each in found.keywords] == ["device"]
