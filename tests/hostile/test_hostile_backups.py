"""Backups that are damaged, mixed or made up: each is refused by name, and no server could start from any of them."""

import hashlib
import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psservice.backups.exporting import into_nothing, read_shard
from psservice.backups.manifest import BACKUP_NAME, MOST_BACKUP_BYTES, BackupError, BackupManifest
from psservice.cli import main as cli
from psservice.storage.manifest import Manifest
from tests.stored_backups import NAME, files_below, rewrite, store_with_backup
from tests.tiers import examples

TENSORS, PART = "shard-1-of-2/state.safetensors", "shard-1-of-2/manifest.json"


@pytest.fixture
def store(tmp_path):
    return store_with_backup(tmp_path)


def import_into(directory, store, capsys, *more, name=NAME):
    capsys.readouterr()
    code = cli.main(["checkpoint", "import", name, "--from", str(store), "--data-dir", str(directory), *more])
    return code, capsys.readouterr().err


def refused(tmp_path, store, capsys):
    """Return why a backup is refused; nothing of it is in the data directory then."""
    before = files_below(tmp_path.parent)
    code, said = import_into(tmp_path / "data", store, capsys)
    assert code == 3, said
    assert files_below(tmp_path / "data") == []
    assert [each for each in files_below(tmp_path.parent) if each not in before] in ([], [f"{tmp_path.name}/data"])
    assert said.isprintable() or said.strip("\n").isprintable()
    return said


def test_a_good_backup_is_imported(tmp_path, store, capsys):
    code, said = import_into(tmp_path / "data", store, capsys)
    assert (code, said) == (0, "")
    assert sorted(os.listdir(tmp_path / "data")) == ["shard-0-of-2", "shard-1-of-2"]


@pytest.mark.parametrize("file", [TENSORS, PART])
@pytest.mark.parametrize("damage", ["one bit", "cut off", "too long", "missing", "empty"])
def test_a_damaged_file_is_refused_by_its_name(file, damage, tmp_path, store, capsys):
    path = store / NAME / file
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "one bit":
        data[-2] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes({"cut off": data[:-1], "too long": data + b"x", "empty": b""}[damage])
    said = refused(tmp_path, store, capsys)
    assert file in said
    words = {"one bit": "damaged", "empty": "cut off"}.get(damage, damage)
    assert words in said


def test_files_of_another_shard_are_refused(tmp_path, store, capsys):
    """The files, and their digests in the manifest, are exchanged."""
    first, second = store / NAME / "shard-0-of-2", store / NAME / "shard-1-of-2"
    first.rename(store / "x")
    second.rename(first)
    (store / "x").rename(second)

    def exchange(plain):
        for what in ("manifest", "tensors"):
            digests = [each[what] for each in plain["shards"]]
            plain["shards"][0][what], plain["shards"][1][what] = reversed(digests)

    rewrite(store, exchange)
    said = refused(tmp_path, store, capsys)
    assert "of shard" in said
    assert "do not belong together" in said


@pytest.mark.parametrize("field", ["run_id", "checkpoint", "version", "num_shards", "generation"])
def test_a_part_of_another_run_checkpoint_or_moment_is_refused(field, tmp_path, store, capsys):
    """The part is whole, and the backup's manifest has its digest."""
    path = store / NAME / PART
    part = Manifest.model_validate_json(path.read_bytes())
    value = getattr(part, field)
    part = part.model_copy(update={field: value + 1 if isinstance(value, int) else f"{value}x"})
    data = part.sealed(part.tensors).model_dump_json(indent=1).encode()
    path.write_bytes(data)
    digest = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(store, lambda plain: plain["shards"][1].update(manifest=digest))
    said = refused(tmp_path, store, capsys)
    assert PART in said
    assert "do not belong together" in said


def test_a_part_that_a_newer_release_wrote_is_refused(tmp_path, store, capsys):
    path = store / NAME / PART
    data = json.dumps({**json.loads(path.read_text()), "format": 5}).encode()
    path.write_bytes(data)
    digest = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(store, lambda plain: plain["shards"][1].update(manifest=digest))
    assert PART in refused(tmp_path, store, capsys)


ABSURD = {
    "a path for a name": {"checkpoint": "../../etc"},
    "another name": {"checkpoint": "other"},
    "no shards": {"shards": []},
    "shards that are none": {"shards": "all"},
    "a shard of petabytes": lambda plain: plain["shards"][0]["tensors"].update(bytes=1 << 60),
    "a manifest of gigabytes": lambda plain: plain["shards"][0]["manifest"].update(bytes=1 << 30),
    "a negative size": lambda plain: plain["shards"][0]["tensors"].update(bytes=-1),
    "a size in words": lambda plain: plain["shards"][0]["tensors"].update(bytes="12"),
    "no digest": lambda plain: plain["shards"][0]["tensors"].update(sha256=""),
    "a gap between shards": lambda plain: plain["shards"][1].update(start=1),
    "a file with a path": lambda plain: plain["shards"][0].update({"../../x": {"bytes": 1, "sha256": "0" * 64}}),
    "a time that is no number": {"created_unix_seconds": float("nan")},
    "a time without end": {"exported_unix_seconds": float("inf")},
    "a run that moves the cursor": {"run_id": "\x1b[2J"},
    "a release of megabytes": {"release": "1" * 2_000_000},
    "five thousand shards": lambda plain: plain.update(shards=plain["shards"] * 2500),
    "a newer format": {"format": 2},
    "a format of no release": {"format": [4]},
}


@pytest.mark.parametrize("what", ABSURD)
def test_an_absurd_manifest_is_refused(what, tmp_path, store, capsys):
    change = ABSURD[what]
    rewrite(store, change if callable(change) else lambda plain: plain.update(change))
    said = refused(tmp_path, store, capsys)
    assert BACKUP_NAME in said
    if what == "a newer format":
        assert "newer release" in said


def test_a_manifest_whose_own_digest_does_not_hold_is_refused(tmp_path, store, capsys):
    path = store / NAME / BACKUP_NAME
    path.write_text(path.read_text().replace('"version": 2', '"version": 3'))
    assert "own digest" in refused(tmp_path, store, capsys)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 100, b"[" * 100_000, b"{}", b"null", b"\xff\xfe", b" " * (MOST_BACKUP_BYTES + 1)]
)
def test_what_is_no_manifest_is_refused(data, tmp_path, store, capsys):
    (store / NAME / BACKUP_NAME).write_bytes(data)
    assert BACKUP_NAME in refused(tmp_path, store, capsys)


def test_an_export_that_broke_off_is_no_backup(tmp_path, store, capsys):
    (store / NAME / BACKUP_NAME).unlink()
    assert "has no backup" in refused(tmp_path, store, capsys)
    assert cli.main(["checkpoint", "list", "--from", str(store)]) == 0
    assert "broke off" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["..", ".", "../store/good", "good/../good", "/", "a" * 250, "good\0"])
def test_no_name_leads_out_of_the_store(name, tmp_path, store, capsys):
    code, said = import_into(tmp_path / "data", store, capsys, name=name)
    assert code == 3, said
    assert cli.main(["checkpoint", "delete", name, "--from", str(store)]) == 3
    assert (store / NAME / BACKUP_NAME).exists()


def test_one_shard_of_a_backup_is_enough_for_the_machine_that_serves_it(tmp_path, store, capsys):
    shutil.rmtree(store / NAME / "shard-0-of-2")
    code, _ = import_into(tmp_path / "data", store, capsys, "--shard", "1")
    assert code == 0
    assert os.listdir(tmp_path / "data") == ["shard-1-of-2"]
    code, said = import_into(tmp_path / "other", store, capsys, "--shard", "2")
    assert (code, "no shard 2" in said) == (3, True)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_of_any_bytes_is_read_or_refused(data, tmp_path_factory):
    good = _good_bytes(tmp_path_factory)
    place = data.draw(st.integers(0, len(good) - 1))
    other = good[:place] + data.draw(st.binary(max_size=8)) + good[place + data.draw(st.integers(0, 8)) :]
    try:
        found, error = BackupManifest.from_bytes(other, "backup.json"), None
    except BackupError as refusal:
        found, error = None, refusal
    assert found.sealed() == found if found is not None else str(error).isprintable()


def _good_bytes(factory):
    if not hasattr(_good_bytes, "found"):
        _good_bytes.found = (store_with_backup(factory.mktemp("good")) / NAME / BACKUP_NAME).read_bytes()
    return _good_bytes.found


# Servers that lie to an export


def sent(store):
    """Return what an honest shard 0 sends: names and sizes, and the bytes behind each."""
    folder = store / NAME / "shard-0-of-2"
    found = []
    for name in ("manifest.json", "state.safetensors"):
        data = (folder / name).read_bytes()
        found += [(name, len(data)), data]
    return found


LIES = {
    "nothing": lambda parts: [],
    "bytes first": lambda parts: [b"x", *parts],
    "tensors first": lambda parts: parts[2:] + parts[:2],
    "a path": lambda parts: [("../../etc/passwd", 5), b"xxxxx"],
    "a manifest of terabytes": lambda parts: [("manifest.json", 1 << 40), *parts[1:]],
    "an empty file": lambda parts: [("manifest.json", 0), *parts[2:]],
    "a negative size": lambda parts: [("manifest.json", -1), *parts[1:]],
    "too few bytes": lambda parts: [*parts[:3], parts[3][:-1]],
    "too many bytes": lambda parts: [*parts[:3], parts[3] + b"x"],
    "no bytes": lambda parts: [*parts[:3], b"", parts[3]],
    "a file more": lambda parts: [*parts, ("more", 1), b"x"],
    "other tensors": lambda parts: [*parts[:3], bytes(len(parts[3]))],
    "no manifest": lambda parts: [("manifest.json", 2), b"{}", *parts[2:]],
    "nested arrays": lambda parts: [("manifest.json", 90_000), b"[" * 90_000, *parts[2:]],
}


@pytest.mark.parametrize("what", LIES)
def test_a_server_that_lies_to_an_export_is_named(what, store):
    parts = sent(store)
    assert read_shard("ps-0:1", iter(parts), into_nothing).manifest.version == 2
    with pytest.raises(BackupError, match="ps-0:1"):
        read_shard("ps-0:1", iter(LIES[what](parts)), into_nothing)
