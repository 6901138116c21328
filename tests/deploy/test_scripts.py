"""The scripts beside the manifests, run: certificates, the Job that re-shards, Slurm with stand-ins for its tools."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest
import torch
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import psclient
from psclient.errors import AccessError
from psclient.rpc.local_server import LocalServer
from psclient.settings import ClientSettings, worker_name
from pscore.net.channels import Security, open_channel
from psservice.cli.main import main
from psservice.rpc.certificates import ServerCertificates
from psservice.settings import ServerSettings
from tests.deploy import manifests
from tests.deploy.manifests import KUBERNETES, ROOT, environment, one
from tests.system.tools import QUICK, make_data, make_model, train_step, wait_until

SLURM = ROOT / "deploy" / "slurm"
SCRIPTS = [
    *(KUBERNETES / name for name in ("make-certificates", "reshard-job")),
    *sorted(SLURM.iterdir()),
    ROOT / ".ci" / "install-kubectl",
]
SECONDS = 110


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script):
    found = shutil.which("shellcheck", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    command = [found] if found else ["bash", "-n"]
    answer = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=SECONDS)
    assert answer.returncode == 0, answer.stdout + answer.stderr


# Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    subprocess.run([KUBERNETES / "make-certificates", folder], check=True, timeout=SECONDS, capture_output=True)
    return folder


@pytest.fixture
def shard(certificates):
    """A health service behind the certificates of a shard, mounted where the overlay mounts them."""
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    files = certificates / "psservice"
    credentials = ServerCertificates(files / "tls.crt", files / "tls.key", files / "ca.crt").credentials
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def answers(address, security):
    with open_channel(address, security) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=30).status == health_pb2.HealthCheckResponse.SERVING


def test_the_secrets_have_the_files_that_pods_look_for(certificates):
    for template, secret in [
        (manifests.server("mtls-secret"), "psservice"),
        (manifests.workers("workers-job")[0], "psclient"),
    ]:
        names = environment("workers-job" if secret == "psclient" else "mtls-secret", template).values()
        wanted = {name.rpartition("/")[2] for name in names if name.startswith("/etc/sparseps-tls/")}
        assert wanted == {path.name for path in (certificates / secret).iterdir()}


def test_workers_get_in_with_the_name_that_they_are_told(certificates, shard):
    name = environment("workers-job", manifests.workers("workers-job")[0])["PSCLIENT_TLS_SERVER_NAME"]
    mine = certificates / "psclient"
    worker = Security(mine / "ca.crt", mine / "tls.crt", mine / "tls.key", name)
    assert answers(shard, worker)
    other = Security(mine / "ca.crt", mine / "tls.crt", mine / "tls.key", "psservice-3.psservice.sparseps.svc")
    assert answers(shard, other)
    inside = certificates / "psservice"  # psservice status, inside the pod of a shard
    assert answers(shard, Security(inside / "ca.crt", inside / "tls.crt", inside / "tls.key", name))


def test_nobody_gets_in_without_a_certificate_or_by_another_name(certificates, shard):
    mine = certificates / "psclient"
    with pytest.raises(grpc.RpcError):
        answers(shard, Security(mine / "ca.crt", None, None, "psservice"))
    with pytest.raises(grpc.RpcError):
        answers(shard, Security(mine / "ca.crt", mine / "tls.crt", mine / "tls.key", "elsewhere"))


def names_of_the_shards(folder):
    shown = subprocess.run(
        ["openssl", "x509", "-in", folder / "psservice" / "tls.crt", "-noout", "-ext", "subjectAltName"],
        capture_output=True, text=True, check=True, timeout=SECONDS,
    ).stdout  # fmt: skip
    return {part.strip().removeprefix("DNS:") for part in shown.splitlines()[1].split(",")}


def test_both_ways_to_certificates_give_the_same_names(certificates):
    assert names_of_the_shards(certificates) == set(one("mtls", "Certificate", "psservice-tls")["spec"]["dnsNames"])


def test_certificates_may_have_further_names_and_addresses(certificates, tmp_path):
    script = [KUBERNETES / "make-certificates", tmp_path]
    hosts = ["--host", "ps.example.org", "--host", "10.0.0.5", "--host", "fd00::5"]
    subprocess.run([*script, *hosts], check=True, timeout=SECONDS, capture_output=True)
    added = names_of_the_shards(tmp_path) - names_of_the_shards(certificates)
    assert added == {"ps.example.org", "IP Address:10.0.0.5", "IP Address:FD00:0:0:0:0:0:0:5"}
    wrong = subprocess.run([*script, "--host"], timeout=SECONDS, capture_output=True, text=True)
    assert (wrong.returncode, "usage" in wrong.stderr) == (2, True)


def test_each_certificate_has_the_role_of_its_folder(certificates, tmp_path):
    """With the file of roles that the script writes, at a real server, on three workers' own certificates."""
    folder = tmp_path / "certificates"
    script = [KUBERNETES / "make-certificates", folder, "--host", "127.0.0.1"]
    workers = [f"site-{letter}-0" for letter in "abc"]
    for names in (workers[:2], workers[2:]):  # the second time makes all of them again
        flags = [word for name in names for word in ("--worker", name)]
        subprocess.run([*script, *flags], check=True, timeout=SECONDS, capture_output=True)
    roles = (folder / "certificate-roles").read_text().splitlines()
    assert roles[-3:] == [f"worker {name}.sparseps-worker {name}" for name in workers]
    ours = {"tls_cert": folder / "psservice" / "tls.crt", "tls_key": folder / "psservice" / "tls.key"}
    secured = {**ours, "tls_client_ca": folder / "ca.crt", "certificate_roles": folder / "certificate-roles"}

    def files(who):
        names = {"tls_ca": "ca.crt", "tls_cert": "tls.crt", "tls_key": "tls.key"}
        return {setting: folder / who / name for setting, name in names.items()}

    def step(who, worker):
        model = make_model(batch_norm=False)
        settings = QUICK.model_copy(update=files(who))
        options = {"lr": 0.05, "model": model, "server": server.server, "worker": worker, "settings": settings}
        with psclient.ASGD(model.parameters(), **options) as optimizer:
            train_step(model, optimizer, *make_data())

    def operate(who, *words):
        flags = [f"--{name.replace('_', '-')}={path}" for name, path in files(who).items()]
        return main([*words, server.addresses[0], *flags])

    with LocalServer(**secured) as server:
        for name in workers:
            step(f"worker-{name}", name)
        step("psclient", "anybody")
        for who, worker in (("worker-site-a-0", "site-b-0"), ("psreader", "w"), ("psservice", "w")):
            with pytest.raises(AccessError):
                step(who, worker)
        assert {who: operate(who, "drain") for who in ("psclient", "worker-site-a-0", "psreader", "psservice")} == {
            "psclient": 3, "worker-site-a-0": 3, "psreader": 3, "psservice": 3,
        }  # fmt: skip
        assert operate("psreader", "status") == 0
        assert operate("psadmin", "drain") == 0
    wrong = subprocess.run([*script, "--worker", "A B"], timeout=SECONDS, capture_output=True, text=True)
    assert (wrong.returncode, "usage" in wrong.stderr) == (2, True)


def test_two_authorities_are_trusted_by_a_bundle_of_both(certificates, tmp_path):
    """The steps of docs/operate/security.md to another authority: both, then the new one alone."""
    folders = {"old": certificates, "new": tmp_path / "next"}
    subprocess.run([KUBERNETES / "make-certificates", folders["new"]], check=True, timeout=SECONDS, capture_output=True)
    authorities = {name: (folder / "ca.crt").read_bytes() for name, folder in folders.items()}
    bundles = {"both": tmp_path / "both.crt", "new": tmp_path / "new.crt"}
    bundles["both"].write_bytes(authorities["old"] + authorities["new"])
    bundles["new"].write_bytes(authorities["new"])

    def gets_in(servers, callers, bundle):
        ours, mine = folders[servers] / "psservice", folders[callers] / "psclient"
        server = grpc.server(ThreadPoolExecutor(2))
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        credentials = ServerCertificates(ours / "tls.crt", ours / "tls.key", bundles[bundle]).credentials
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        try:
            caller = Security(bundles[bundle], mine / "tls.crt", mine / "tls.key", "psservice")
            return answers(f"127.0.0.1:{port}", caller)
        except grpc.RpcError:
            return False
        finally:
            server.stop(None).wait()

    for servers in folders:
        for callers in folders:
            assert gets_in(servers, callers, "both"), (servers, callers)
            assert gets_in(servers, callers, "new") == (servers == callers == "new")


@pytest.mark.parametrize("script", ["kubernetes/make-certificates", "kubernetes/reshard-job", "slurm/submit"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_a_script_says_how_it_is_called_and_does_nothing(script, flag, tmp_path):
    answer = subprocess.run(
        [KUBERNETES.parent / script, flag], timeout=SECONDS, capture_output=True, text=True, cwd=tmp_path
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert f"deploy/{script} " in answer.stdout
    assert not answer.stdout.startswith("#")
    assert [*tmp_path.iterdir()] == []


# Re-sharding


def reshard_job(*arguments, **variables):
    answer = subprocess.run(
        [KUBERNETES / "reshard-job", *arguments],
        capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **variables},
    )  # fmt: skip
    return answer.returncode, answer.stdout


def test_the_job_is_valid_and_fits_the_shards():
    status, text = reshard_job("3", "e1-v7", STORAGE_CLASS="shared", STORAGE="5Gi")
    assert status == 0
    claim, job = yaml.safe_load_all(text)
    from kubernetes_validate import validate

    for each in (claim, job):
        validate(each, "1.32.0", strict=True)
    assert claim["spec"]["storageClassName"] == "shared"
    spec = job["spec"]["template"]["spec"]
    named = [v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v]
    stateful = one("reshard", "StatefulSet", "psservice")
    template = stateful["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    assert named == [claim["metadata"]["name"], *(f"{template}-{stateful['metadata']['name']}-{i}" for i in range(3))]
    volumes = {volume["name"]: volume for volume in stateful["spec"]["template"]["spec"]["volumes"]}
    assert volumes["init"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    pod = stateful["spec"]["template"]
    assert spec["containers"][0]["image"] == manifests.container(pod)["image"]
    assert spec["serviceAccountName"] == pod["spec"]["serviceAccountName"]
    assert spec["securityContext"] == pod["spec"]["securityContext"]


def test_the_job_of_a_run_with_a_suffix_reads_that_runs_claims():
    _, text = reshard_job("2", NAME_SUFFIX="-cifar")
    job = list(yaml.safe_load_all(text))[1]
    spec = job["spec"]["template"]["spec"]
    stateful, account = one("named-run", "StatefulSet", "psservice"), one("named-run", "ServiceAccount", "sparseps")
    claims = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {"psservice-init", *(f"data-{stateful['metadata']['name']}-{index}" for index in range(2))}
    assert spec["serviceAccountName"] == account["metadata"]["name"]


@pytest.mark.parametrize("arguments", [[], ["0"], ["two"], ["2", "a b"], ["2", "", "/elsewhere"], ["2", "$(x)"]])
def test_wrong_arguments_print_nothing(arguments):
    assert reshard_job(*arguments) == (2, "")


@pytest.mark.long
def test_one_shard_begins_with_the_model_of_two(tmp_path):
    data, init = tmp_path / "data", tmp_path / "init"
    with LocalServer(shards=2, data_dir=data) as server:
        model = make_model()
        optimizer = psclient.DGS(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK)
        for _ in range(2):
            train_step(model, optimizer, *make_data())
        optimizer.close()
        before = psclient.download(server.server)
    for index in range(2):  # a claim each
        (tmp_path / "claims" / str(index)).mkdir(parents=True)
        (data / f"shard-{index}-of-2").rename(tmp_path / "claims" / str(index) / f"shard-{index}-of-2")
    init.mkdir()

    _, text = reshard_job("2")
    container = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"][0]
    script = container["args"][0].replace("/claims/", f"{tmp_path}/claims/").replace("/init", str(init))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "psservice").write_text(f'#!/bin/sh\nexec {sys.executable} -m psservice "$@"\n')
    (programs / "psservice").chmod(0o755)
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run([*container["command"], script], check=True, timeout=SECONDS, env=environ, cwd=ROOT)
    assert subprocess.run([*container["command"], script], timeout=SECONDS, env=environ, cwd=ROOT).returncode == 1

    found = environment("reshard", manifests.server("reshard"))["PSSERVICE_INIT"]
    with LocalServer(init=found.replace("/init", str(init)), data_dir=tmp_path / "run-2") as server:
        model = make_model(1)
        optimizer = psclient.DGS(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK)
        assert optimizer.version == 2
        after = psclient.download(server.server)
        optimizer.close()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


# Slurm


@pytest.fixture
def slurm(tmp_path):
    """Stand-ins for Slurm's commands: ``srun`` starts its tasks here, the others write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    srun = f"""\
        #!{sys.executable}
        import os, signal, subprocess, sys
        words = sys.argv[1:]
        tasks = 1
        while words[0].startswith("--"):
            name, _, value = words.pop(0).partition("=")
            tasks = int(value) if name == "--ntasks" else tasks
        children = [
            subprocess.Popen(words, env={{**os.environ, "SLURM_PROCID": str(i)}}) for i in range(tasks)
        ]
        signal.signal(signal.SIGTERM, lambda *_: [child.send_signal(signal.SIGTERM) for child in children])
        sys.exit(max(child.wait() for child in children))
        """
    note = f"""\
        #!{sys.executable}
        import json, os, sys
        names = {{name: os.environ.get(name) for name in ("SPARSEPS_RUN", "SPARSEPS_SHARDS")}}
        with open({str(tmp_path / "calls")!r}, "a") as calls:
            calls.write(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], names]) + "\\n")
        print(4711)
        """
    psservice = f"""\
        #!{sys.executable}
        import json, os, signal, sys
        settings = {{name: value for name, value in os.environ.items() if name.startswith("PSSERVICE_")}}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with open({str(tmp_path)!r} + "/shard-" + os.environ["SLURM_PROCID"], "w") as file:
            json.dump([sys.argv[1:], settings], file)
        signal.pause()
        """
    programs = {"srun": srun, "sbatch": note, "psservice": psservice}
    for name, text in programs.items():
        (folder / name).write_text(textwrap.dedent(text))
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_submit_makes_three_jobs_that_follow_each_other(slurm, tmp_path):
    run = tmp_path / "run"
    (run / "addresses").mkdir(parents=True)  # of shards that are gone
    subprocess.run(
        [SLURM / "submit", run, "2", "8", "python", "train.py", "a b"],
        check=True, timeout=SECONDS, env=slurm, capture_output=True,
    )  # fmt: skip
    shards, workers, end = (json.loads(line) for line in (tmp_path / "calls").read_text().splitlines())
    assert str(SLURM / "shards.sbatch") in shards[1]
    assert "--ntasks=2" in shards[1]
    assert shards[2] == {"SPARSEPS_RUN": str(run), "SPARSEPS_SHARDS": "2"}
    assert workers[1][-4:] == [str(SLURM / "workers.sbatch"), "python", "train.py", "a b"]
    assert {"--array=0-7", "--dependency=after:4711"} <= set(workers[1])
    assert {"--dependency=afterany:4711", "--wrap=scancel --signal=TERM 4711"} <= set(end[1])
    assert not (run / "addresses").exists()
    assert subprocess.run([SLURM / "submit", run, "0", "8", "true"], env=slurm, timeout=SECONDS).returncode == 2


def test_workers_of_an_array_are_told_where_the_shards_are(slurm, tmp_path, monkeypatch):
    run = tmp_path / "run"
    variables = {
        "SPARSEPS_RUN": str(run), "SPARSEPS_SHARDS": "2", "SPARSEPS_PORT": "6000", "SPARSEPS_HOST": "node-7",
        "PSSERVICE_INSECURE": "true", "SLURM_CPUS_PER_TASK": "3",
    }  # fmt: skip
    batch = subprocess.Popen(["bash", SLURM / "shards.sbatch"], env=slurm | variables)
    try:
        shown = "import json, os; print(json.dumps(dict(os.environ)))"
        array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_PROCID": "0"}
        answer = subprocess.run(
            ["bash", SLURM / "workers.sbatch", sys.executable, "-c", shown],
            env=slurm | variables | array, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        told = json.loads(answer.stdout)
        assert told["WORLD_SIZE"] == "8"
        for name in ("PSCLIENT_SERVER", "JOB_COMPLETION_INDEX"):
            monkeypatch.setenv(name, told[name])
        assert ClientSettings().server == "node-7:6000,node-7:6001"
        assert worker_name(ClientSettings(), told) == "job-3"

        files = [tmp_path / f"shard-{index}" for index in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60)
        for index in range(2):
            words, settings = json.loads(files[index].read_text())
            assert words == ["serve"]
            with monkeypatch.context() as patched:
                for name, value in settings.items():
                    patched.setenv(name, value)
                loaded = ServerSettings()
            assert (loaded.shard_index, loaded.num_shards) == (index, 2)
            assert loaded.listen == f"0.0.0.0:{6000 + index}"
            assert (loaded.data_dir, loaded.compute_threads) == (run / "data", 3)
        (step,) = psutil.Process(batch.pid).children()
        step.terminate()  # as Slurm does before the time is over: the steps, not the script
        assert batch.wait(60) == 0
    finally:
        if batch.poll() is None:
            for process in [*psutil.Process(batch.pid).children(recursive=True), batch]:
                process.kill()
            batch.wait(60)
