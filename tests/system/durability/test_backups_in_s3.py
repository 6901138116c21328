"""Backups in an S3-compatible store: moto's server, which imitates S3 in memory; it is not a store of its own."""

import json
import shutil

import boto3
import pytest
from moto.server import ThreadedMotoServer

from psservice.cli import main as cli
from tests.stored_backups import NAME, files_below, store_with_backup
from tests.system.durability.test_backups import Run, command, done

BUCKET = "backups"


@pytest.fixture
def bucket(monkeypatch):
    """An empty bucket, which the environment leads to."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "somebody"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield client
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for each in page.get("Contents", ()):
            client.delete_object(Bucket=BUCKET, Key=each["Key"])
    client.delete_bucket(Bucket=BUCKET)
    server.stop()


def test_a_run_goes_on_from_a_bucket(bucket, tmp_path, capsys):
    run, url = Run(tmp_path), f"s3://{BUCKET}/runs/one"
    with run.server:
        run.train(3)
        assert done(capsys, "list", "--from", url)["backups"] == []
        old = done(capsys, "export", "new", run.server.server, "--to", url)["checkpoint"]
        run.train(1)
        new = done(capsys, "export", "new", run.server.server, "--to", url, "--keep", "1")
        assert new["removed"] == [old]
        assert new["url"] == f"{url}/{new['checkpoint']}"
        keys = [each["Key"] for each in bucket.list_objects_v2(Bucket=BUCKET)["Contents"]]
        assert sorted(key.removeprefix(f"runs/one/{new['checkpoint']}/") for key in keys) == [
            "backup.json",
            *(f"shard-{i}-of-2/{name}" for i in (0, 1) for name in ("manifest.json", "state.safetensors")),
        ]
        assert done(capsys, "show", new["checkpoint"], "--from", url, "--verify")["verified"]
        run.lose_all_machines()
        done(capsys, "import", new["checkpoint"], "--from", url, "--data-dir", run.data)
        run.restart()
        assert [each.version for each in run.status()] == [4, 4]
        run.train(1)
        run.optimizer.close()
        code, _ = command(capsys, "delete", new["checkpoint"], "--from", url)
        assert code == 0
        assert "Contents" not in bucket.list_objects_v2(Bucket=BUCKET)


def test_a_damaged_object_is_refused_by_its_name(bucket, tmp_path, capsys):
    for path in (store_with_backup(tmp_path) / NAME).rglob("*.*"):
        if path.is_file():
            bucket.upload_file(str(path), BUCKET, str(path.relative_to(tmp_path / "store")))
    key = f"{NAME}/shard-1-of-2/state.safetensors"
    data = bucket.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    bucket.put_object(Bucket=BUCKET, Key=key, Body=data[:-1] + bytes([data[-1] ^ 1]))
    code, printed = command(capsys, "import", NAME, "--from", f"s3://{BUCKET}", "--data-dir", tmp_path / "data")
    assert (code, key in printed.err) == (3, True)
    assert files_below(tmp_path / "data") == []
    bucket.delete_object(Bucket=BUCKET, Key=key)
    code, printed = command(capsys, "import", NAME, "--from", f"s3://{BUCKET}", "--data-dir", tmp_path / "data")
    assert (code, f"{key} is missing" in printed.err) == (3, True)


def test_a_store_that_cannot_be_used_is_named(bucket, tmp_path, capsys, monkeypatch):
    for url in ("s3://no-such-bucket/x", "no-such-scheme://x/y"):
        code = cli.main(["checkpoint", "import", NAME, "--from", url, "--data-dir", str(tmp_path / "data")])
        assert code == 3
        assert url in capsys.readouterr().err
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    code = cli.main(["checkpoint", "list", "--from", f"s3://{BUCKET}/elsewhere", "--json"])
    printed = capsys.readouterr()
    assert code == 3, json.dumps(printed.out)
    assert "elsewhere" in printed.err
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
