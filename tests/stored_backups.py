"""A backup of two shards that a worker has trained, and copies of it that a test may break."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import psclient
from psclient.rpc.local_server import LocalServer
from psservice.backups.manifest import BackupManifest
from psservice.cli import main as cli
from tests.system.tools import QUICK, make_data, make_model, train_step

NAME = "good"


@cache
def _backup():
    """Return a store with the backup ``good``; it is never changed."""
    directory = Path(mkdtemp(prefix="sparseps-backup-"))
    with LocalServer(shards=2, data_dir=directory / "data") as server:
        model = make_model(batch_norm=False)
        with psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK) as optimizer:
            for _ in range(2):
                train_step(model, optimizer, *make_data())
        assert cli.main(["checkpoint", "create", server.server, "--name", NAME]) == 0
        assert cli.main(["checkpoint", "export", NAME, server.server, "--to", str(directory / "store")]) == 0
    return directory / "store"


def store_with_backup(directory):
    """Return a store, a copy, with the backup ``good``."""
    return Path(shutil.copytree(_backup(), directory / "store"))


def rewrite(store, change, name=NAME):
    """Change a backup's manifest as JSON and seal it again, as whoever can write to the store could."""
    path = store / name / "backup.json"
    plain = json.loads(path.read_text())
    change(plain)
    plain["sha256"] = ""
    path.write_text(json.dumps(plain))
    try:
        path.write_bytes(BackupManifest.model_validate_json(path.read_bytes()).sealed().to_bytes())
    except ValueError:  # no manifest: as it is
        return


def files_below(directory):
    """Return the names of everything below a directory."""
    return sorted(str(each.relative_to(directory)) for each in directory.rglob("*")) if directory.exists() else []
