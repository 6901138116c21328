"""What the build of the image takes out of an environment, and what it leaves."""

import runpy
from pathlib import Path

import pytest

UNUSED = runpy.run_path(str(Path(__file__).parents[2] / "deploy" / "slim.py"))["unused"]
OUT = (
    *("torch/test/test_jit.py", "torch/include/torch.h", "torch/bin/protoc", "torch/share/cmake/Torch.cmake"),
    *("torch/lib/libtorchbind_test.so", "numpy/_core/tests/test_numeric.py", "numpy/random/lib/libnpyrandom.a"),
    *("yaml/_yaml.pyi", "botocore/data/ec2/2016-11-15/service-2.json.gz", "torch/__pycache__/x.pyc"),
)
IN = (
    *("torch/__init__.py", "torch/lib/libtorch_cpu.so", "torch/bin/torch_shm_manager", "torch/testing/_utils.py"),
    *("psclient/py.typed", "pscore/wire/v1/parameter_server_pb2.pyi", "torch-2.13.0.dist-info/licenses/LICENSE"),
    *("botocore/data/s3/2006-03-01/service-2.json.gz", "botocore/data/endpoints.json", "numpy.libs/libgfortran.so"),
)


@pytest.fixture(name="packages")
def site_packages(tmp_path: Path) -> Path:
    for name in (*OUT, *IN):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def test_what_no_program_imports_goes_and_the_rest_stays(packages):
    unused = set(UNUSED(packages))
    gone = {name for name in (*OUT, *IN) if unused & {packages / name, *(packages / name).parents}}
    assert gone == set(OUT)
