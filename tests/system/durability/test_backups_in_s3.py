"""Backups in an S3-compatible store, OpenStack Swift."""

import fsspec
import pytest

from tests.stored_backups import NAME, files_below, store_with_backup
from tests.system.durability.test_backups import Run, command, done
from tests.system.s3_server import SECRET, USER, s3_server

pytestmark = pytest.mark.xdist_group("s3")

BUCKET = "backups"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("swift") / "s3") as endpoint:
        yield endpoint


@pytest.fixture
def bucket(endpoint, monkeypatch):
    """An empty bucket, which the environment leads to, as a file system."""
    for name, value in (
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", USER),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    files.mkdir(BUCKET)
    yield files
    for path in files.find(BUCKET):
        files.rm_file(path)
    files.rmdir(BUCKET)


@pytest.mark.long
@pytest.mark.timeout(600)  # the store's four servers start first
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
        folder = f"{BUCKET}/runs/one/{new['checkpoint']}/"
        assert sorted(path.removeprefix(folder) for path in bucket.find(BUCKET)) == [
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
        assert bucket.find(BUCKET) == []


def test_a_damaged_object_is_refused_by_its_name(bucket, tmp_path, capsys):
    for path in (store_with_backup(tmp_path) / NAME).rglob("*.*"):
        if path.is_file():
            bucket.put_file(str(path), f"{BUCKET}/{path.relative_to(tmp_path / 'store')}")
    key = f"{NAME}/shard-1-of-2/state.safetensors"
    data = bucket.cat_file(f"{BUCKET}/{key}")
    bucket.pipe_file(f"{BUCKET}/{key}", data[:-1] + bytes([data[-1] ^ 1]))
    code, printed = command(capsys, "import", NAME, "--from", f"s3://{BUCKET}", "--data-dir", tmp_path / "data")
    assert (code, key in printed.err) == (3, True)
    assert files_below(tmp_path / "data") == []
    bucket.rm_file(f"{BUCKET}/{key}")
    code, printed = command(capsys, "import", NAME, "--from", f"s3://{BUCKET}", "--data-dir", tmp_path / "data")
    assert (code, f"{key} is missing" in printed.err) == (3, True)


@pytest.mark.long
def test_a_store_that_cannot_be_used_is_named(bucket, tmp_path, capsys, monkeypatch):
    for url in ("s3://no-such-bucket/x", "no-such-scheme://x/y"):
        code, printed = command(capsys, "import", NAME, "--from", url, "--data-dir", tmp_path / "data")
        assert (code, url in printed.err) == (3, True)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    code, printed = command(capsys, "list", "--from", f"s3://{BUCKET}/x")
    assert (code, f"s3://{BUCKET}/x" in printed.err) == (3, True)
    assert "signature" in printed.err
