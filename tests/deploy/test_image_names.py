"""One file names the images, and everything that starts a container takes them from it."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pscore.version import __version__
from tests.deploy import manifests
from tests.tiers import long_but

ROOT = Path(__file__).parents[2]
PLACE = Path("kubernetes/components/release/images.env")
DIGEST = f"sha256:{'5a' * 32}"
OTHER = {
    "SERVER_IMAGE": f"registry.example/team/sparseps@{DIGEST}",
    "GPU_SERVER_IMAGE": "registry.example/team/sparseps:9.9.9-gpu",
    "WORKER_IMAGE": f"registry.example:5000/team/worker:9.9.9@{DIGEST}",
}


def named(deploy: Path) -> dict[str, str]:
    """The images of a copy of ``deploy/`` by the variables of the one file."""
    return dict(re.findall(r"^(\w+)=(\S+)$", (deploy / PLACE).read_text(), re.MULTILINE))


@pytest.fixture(name="changed", scope="module")
def copy_with_other_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of ``deploy/`` in which the one file names other images."""
    copy = tmp_path_factory.mktemp("images") / "deploy"
    shutil.copytree(ROOT / "deploy", copy, symlinks=True)
    (copy / PLACE).write_text("".join(f"{name}={image}\n" for name, image in OTHER.items()))
    return copy


def images_of(template: dict[str, Any]) -> set[str]:
    containers = [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]
    return {container["image"] for container in containers}


def wanted(overlay: str, kind: str, images: dict[str, str]) -> set[str]:
    if kind == "StatefulSet":
        return {images["GPU_SERVER_IMAGE" if overlay == "gpu" else "SERVER_IMAGE"]}
    return {images["SERVER_IMAGE" if kind == "CronJob" else "WORKER_IMAGE"]}


@pytest.mark.parametrize("overlay", long_but(["cpu-dev", "production"], manifests.OVERLAYS))
def test_every_pod_of_an_overlay_has_the_image_of_the_one_file(overlay):
    for kind, template in manifests.pods(overlay):
        assert images_of(template) == wanted(overlay, kind, named(ROOT / "deploy"))


@pytest.mark.parametrize("overlay", long_but(["cpu-dev", "production"], manifests.OVERLAYS))
def test_a_registry_a_tag_and_a_digest_in_the_one_file_reach_every_pod(overlay, changed, monkeypatch):
    monkeypatch.setattr(manifests, "KUBERNETES", changed / "kubernetes")
    found = list(manifests.pods(overlay))
    assert found
    for kind, template in found:
        assert images_of(template) == wanted(overlay, kind, OTHER)
    assert not [each for each in manifests.build(overlay) if each["metadata"]["name"] == "images"]


@pytest.mark.parametrize("environment", [{}, {"IMAGE": "mine:1"}])
def test_the_job_that_reshards_takes_the_servers_image(environment, changed, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = subprocess.run(
        [changed / "kubernetes" / "reshard-job", "2"], check=True, capture_output=True, text=True, timeout=60
    )
    job = list(yaml.safe_load_all(made.stdout))[1]
    assert images_of(job["spec"]["template"]) == {environment.get("IMAGE", OTHER["SERVER_IMAGE"])}


def test_compose_reads_the_one_file():
    beside = ROOT / "deploy" / ".env"
    assert beside.resolve() == ROOT / "deploy" / PLACE
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"].values()
    built = {service["image"] for service in services if "build" in service}
    assert built == {"${SERVER_IMAGE}", "${WORKER_IMAGE}"}


def test_no_other_file_names_an_image_of_ours():
    files = [path for path in (ROOT / "deploy").rglob("*") if path.is_file() and not path.is_symlink()]
    naming = {
        path.relative_to(ROOT / "deploy")
        for path in files
        if re.search(r"^[^#\n]*\bsparseps[\w-]*:\d", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert naming == {PLACE}


def test_the_images_carry_the_version_of_this_source():
    assert {name: image.rpartition(":")[2] for name, image in named(ROOT / "deploy").items()} == {
        "SERVER_IMAGE": __version__,
        "GPU_SERVER_IMAGE": f"{__version__}-gpu",
        "WORKER_IMAGE": __version__,
    }
