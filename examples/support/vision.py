"""torchvision, also where its compiled operators are missing: ``from support.vision import torchvision``.

A CPU build of torch beside a CUDA build of torchvision, as some package indexes pair them, fails at the import with
``operator torchvision::nms does not exist``: torchvision's Python code describes its operators to torch, and its
library with these operators cannot be loaded. Models, datasets and transforms do not need them. So where that library
does not load, the operators' names are declared here before the import; calling one is still an error. With builds
that belong together this module does nothing but the import.
"""

import importlib.util
import re
import sys
from pathlib import Path

import torch

_DESCRIPTION = re.compile(r"register_fake\(\"torchvision::(\w+)\"\)|register_meta\(\"(\w+)\"\)")


def _declare_missing_operators() -> torch.library.Library | None:
    """Declare the operators that torchvision describes and cannot load; return what keeps the declarations alive."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        sys.exit("this example needs torchvision: pip install -c constraints.txt '.[examples]'")
    package = Path(found.origin).parent
    library = next(package.glob("_C*.so"), None)
    try:
        if library is not None:
            torch.ops.load_library(str(library))
            return None
    except OSError:
        pass
    described = _DESCRIPTION.findall((package / "_meta_registrations.py").read_text())
    declared = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted({fake or meta for fake, meta in described}):
        declared.define(f"{name}(Tensor x) -> Tensor")
    return declared


_declared = _declare_missing_operators()  # the reference keeps the declarations

import torchvision  # noqa: E402
import torchvision.transforms.v2  # noqa: E402

__all__ = ["torchvision"]
