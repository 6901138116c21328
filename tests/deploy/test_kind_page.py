"""Every command of docs/operate/kind.md, in order, beside a cluster that is only a list of what was applied."""

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from psclient.cli import command_parser as client_parser
from psservice.cli.parser import command_parser as server_parser
from tests.deploy import manifests
from tests.deploy.manifests import KUBERNETES, ROOT, Object
from tests.deploy.test_manifests import validate
from tools.container_test.manifests import expanded

PAGE = ROOT / "docs" / "operate" / "kind.md"
CLUSTER = "sparseps"
ORDINAL = re.compile(r"(.+)-(\d+)")


class RefusedError(AssertionError):
    """A command names something that is not there."""


def require(condition: object, why: str) -> None:
    if not condition:
        raise RefusedError(why)


def commands(text: str) -> list[list[str]]:
    """The words of each command of a page's consoles, as a shell makes them."""
    lines = [
        line.removeprefix("$ ").partition("  #")[0]
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    shell = "".join(f"printf '%s\\0' {line}; printf '\\n\\0'\n" for line in lines)
    words = subprocess.run(["bash", "-euc", shell], capture_output=True, text=True, check=True, timeout=60).stdout
    return [each.strip("\0").split("\0") for each in words.split("\n\0") if each]


def options(words: list[str], **flags: type) -> tuple[dict[str, str], list[str]]:
    """Take a command's flags out of its words; an unknown one is refused."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name, kind in flags.items():
        flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
        extra = {"action": "store_true"} if kind is bool else {}
        parser.add_argument(flag, dest=name, **extra)
    known, rest = parser.parse_known_args(words)
    require(not [word for word in rest if word.startswith("-")], f"{words}: unknown flag")
    return vars(known), rest


class Cluster:
    """What was built, loaded and applied; each command is a method that finds what it needs or refuses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exists = False
        self.built: set[str] = set()
        self.loaded: set[str] = set()
        self.objects: dict[tuple[str, str], Object] = {}
        self.certificates: set[Path] = set()

    def run(self, words: list[str]) -> None:
        program, *rest = words
        known: dict[str, Callable[[list[str]], None]] = {
            "kind": self.kind, "docker": self.docker, "kubectl": self.kubectl,
            "deploy/kubernetes/make-certificates": self.make_certificates,
        }  # fmt: skip
        require(program in known, f"{program}: no program that this test knows")
        known[program](rest)

    def kind(self, words: list[str]) -> None:
        given, rest = options(words, name=str)
        require(given["name"] == CLUSTER, f"kind: {given['name']} is another cluster")
        if rest == ["create", "cluster"]:
            require(not self.exists, "it is there already")
            self.exists = True
        elif rest == ["delete", "cluster"]:
            require(self.exists, "there is none")
            self.exists = False
        else:
            require(rest[:2] == ["load", "docker-image"], f"kind {rest}")
            require({*rest[2:]} <= self.built, f"{rest[2:]}: not built")
            self.loaded.update(rest[2:])

    def docker(self, words: list[str]) -> None:
        given, rest = options(words, file=str, target=str, tag=str)
        require(rest == ["build", "."], f"docker {rest}")
        stages = re.findall(r"^FROM .* AS (\S+)$", (ROOT / given["file"]).read_text(), re.MULTILINE)
        require(given["target"] in stages, f"{given['target']}: no stage of {given['file']}")
        self.built.add(given["tag"])

    def make_certificates(self, words: list[str]) -> None:
        if not shutil.which("openssl"):
            pytest.skip("openssl is not installed")
        (folder,) = words
        script = KUBERNETES / "make-certificates"
        subprocess.run([script, folder], cwd=self.folder, check=True, capture_output=True, timeout=60)
        self.certificates.update(path.relative_to(self.folder) for path in (self.folder / folder).iterdir())

    def kubectl(self, words: list[str]) -> None:
        require(self.exists, "there is no cluster")
        own, _, inside = "\0".join(words).partition("\0--\0")
        given, rest = options(
            own.split("\0"), n=str, f=str, k=str, l=str, tail=str, timeout=str, grace_period=str, force=bool,
            **{"for": str, "from_file": str, "out": str},
        )  # fmt: skip
        verb, *objects = rest
        if given["f"] or given["k"]:
            require(not objects, f"kubectl {words}")
            return self.change(verb, given["f"], given["k"])
        require(given["n"] == CLUSTER, f"kubectl {words}: in another namespace")
        handlers: dict[str, Callable[[], None]] = {
            "create": lambda: self.create(objects, given["from_file"]),
            "delete": lambda: self.delete(objects),
            "exec": lambda: self.inside(objects, inside.split("\0")),
            "cp": lambda: self.pod(objects[0].partition(":")[0]),
            "port-forward": lambda: self.forward(objects),
            "get": lambda: require(objects == ["pvc"], f"get {objects}"),
            "logs": lambda: self.log(given["l"]),
            "rollout": lambda: require(objects[0] == "status" and self.named(objects[1]), f"rollout {objects}"),
            "wait": lambda: self.named(objects[0]),
        }
        require(verb in handlers, f"kubectl {verb}: none that this test knows")
        return handlers[verb]()

    def change(self, verb: str, file: str | None, folder: str | None) -> None:
        if file:
            built = [*yaml.safe_load_all((ROOT / file).read_text())]
        else:
            path = ROOT / str(folder)
            require(path.parent == KUBERNETES / "overlays", f"{folder}: no overlay")
            built = [*manifests.build(path.name)]
        for each in built:
            key = (each["kind"], each["metadata"]["name"])
            require(verb in ("apply", "delete"), f"kubectl {verb}")
            if verb == "delete":
                require(key in self.objects, f"{key} was not applied")
                del self.objects[key]
                continue
            validate(each)
            spaces = {name for kind, name in self.objects if kind == "Namespace"}
            require(each["kind"] == "Namespace" or each["metadata"]["namespace"] in spaces, f"{key}: no namespace")
            self.objects[key] = each
            for template in manifests.templates_of(each):
                self.require_startable(template)

    def require_startable(self, template: Object) -> None:
        image = manifests.container(template)["image"]
        require(image in self.loaded, f"{image}: not loaded into the cluster")
        for volume in template["spec"]["volumes"]:
            if "secret" in volume:
                require(("Secret", volume["secret"]["secretName"]) in self.objects, f"{volume}: no such Secret")

    def create(self, objects: list[str], source: str) -> None:
        require(objects[:2] == ["secret", "generic"], f"create {objects}")
        require(Path(source) in self.certificates, f"{source}: no folder of make-certificates")
        self.objects["Secret", objects[2]] = {"kind": "Secret", "metadata": {"name": objects[2]}}

    def delete(self, objects: list[str]) -> None:
        kind, name = objects
        if kind == "pod":
            self.pod(name)
        else:
            key = self.named(f"{kind}/{name}")
            del self.objects[key]

    def named(self, word: str) -> tuple[str, str]:
        kind, _, name = word.partition("/")
        if kind == "pod":
            self.pod(name)
            return kind, name
        found = [key for key in self.objects if key[0].lower() == kind and key[1] == name]
        require(found, f"{word}: was not applied")
        return found[0]

    def pod(self, name: str) -> Object:
        """A pod of a StatefulSet, by its ordinal."""
        match = ORDINAL.fullmatch(name)
        require(match, f"{name}: no pod of a StatefulSet")
        assert match is not None
        stateful = self.objects.get(("StatefulSet", match[1]))
        require(stateful and int(match[2]) < stateful["spec"]["replicas"], f"{name}: no such pod")
        assert stateful is not None
        return dict(stateful["spec"]["template"])

    def forward(self, objects: list[str]) -> None:
        word, ports = objects
        ports_there = {port["containerPort"] for port in manifests.container(self.pod(word.partition("/")[2]))["ports"]}
        require(int(ports.partition(":")[2]) in ports_there, f"{objects}: no such port")

    def log(self, selector: str) -> None:
        wanted = dict(part.split("=") for part in selector.split(","))
        for each in self.objects.values():
            for template in manifests.templates_of(each):
                labels = dict(template["metadata"]["labels"])
                if each["kind"] == "Job":
                    labels["batch.kubernetes.io/job-completion-index"] = "0"
                if wanted.items() <= labels.items():
                    return
        raise RefusedError(f"{selector}: no pod has these labels")

    def inside(self, objects: list[str], words: list[str]) -> None:
        template = self.pod(objects[0])
        program, *rest = words
        variables: dict[str, str] = {}
        for each in manifests.container(template)["env"]:
            variables[each["name"]] = expanded(each.get("value", ""), variables)
        with patch.dict(os.environ, {"PSCLIENT_SERVER": variables["PSCLIENT_SERVER"]}):
            given = vars({"psservice": server_parser, "psclient": client_parser}[program]().parse_args(rest))
        for address in given["addresses"]:
            *pods, service = address.removeprefix("dns:///").rpartition(":")[0].split(".")
            for pod in pods:
                self.pod(pod)
            require(("Service", service) in self.objects, f"{address}: no such Service")
        if out := given.get("out"):
            mounts = [mount["mountPath"] for mount in manifests.container(template)["volumeMounts"]]
            require(any(str(out).startswith(f"{mount}/") for mount in mounts), f"{out}: cannot be written there")


def follow(text: str, folder: Path) -> Cluster:
    """Give every command of a page to a cluster of its own, which is returned."""
    cluster = Cluster(folder)
    taken = commands(text)
    assert len(taken) > 20
    for words in taken:
        cluster.run(words)
    return cluster


def test_every_command_of_the_page_finds_what_it_names(tmp_path):
    cluster = follow(PAGE.read_text(), tmp_path)
    assert not cluster.exists
    assert {kind for kind, _ in cluster.objects} == {"Namespace", "Secret"}, "delete -k leaves the namespace"


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("overlays/cpu-dev\n", "overlays/cpu-prod\n"),
        ("status psservice-{0..1}.", "status psservice-{0..2}."),
        ("statefulset/psservice-second", "statefulset/psservice-cifar"),
        ("secret generic psclient-tls", "secret generic psworker-tls"),
        ("job-completion-index=0,app.kubernetes.io/component=worker", "job-completion-index=0,component=worker"),
        ("9464:9464", "9464:9465"),
        ("--target quickstart --tag localhost/sparseps-quickstart:0.1.0", "--target quickstart --tag sparseps:0.1.0"),
    ],
)
def test_a_wrong_line_is_found(line, instead, tmp_path):
    text = PAGE.read_text()
    assert line in text
    with pytest.raises(AssertionError):
        follow(text.replace(line, instead, 1), tmp_path)
