"""The short form of ``make chaos``: servers broken under load, and every push accounted for."""

import json
import subprocess
import sys

import pytest

from verify.cluster import release_before
from verify.cluster.release_before import NoReleaseBeforeError
from verify.forgetful import filesystem


def run_chaos(output, *arguments: str) -> dict:
    words = [sys.executable, "-m", "verify", *arguments, "--workers", "3", "--output", str(output)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((output / "chaos.json").read_text())
    assert found["good"]
    totals = found["totals"]
    assert totals["sent"] == totals["acknowledged"] == totals["applied"] > 0
    assert (totals["lost"], totals["duplicated"], totals["different"]) == (0, 0, 0)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_lost_or_doubled_under_kills_and_images_are_replicas(tmp_path):
    found = run_chaos(tmp_path, "--kills", "3", "--only", "kills")
    assert found["totals"]["compared"] > 5
    assert found["totals"]["topk_replies"] > 0
    assert found["faults"]["servers killed"] >= 3


@pytest.mark.executes_python  # a process that the fork server forks does not share a mount of the one that asks
@pytest.mark.long
@pytest.mark.timeout(300)
def test_nothing_is_lost_without_room(tmp_path):
    found = run_chaos(tmp_path, "--only", "disk", "--rounds", "1")
    assert found["faults"]["files of a server limited"] == 1
    skipped = any("SKIPPED" in note for note in found["notes"])
    assert skipped or found["faults"]["disk filled"] == 1


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nothing_is_lost_when_a_disk_breaks(tmp_path):
    found = run_chaos(tmp_path, "--only", "fsync", "--rounds", "1")
    assert found["faults"]["fsync failed"] == 4


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nothing_is_lost_without_descriptors(tmp_path):
    found = run_chaos(tmp_path, "--only", "descriptors", "--rounds", "1")
    assert found["faults"]["descriptors used up"] == 1


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_flipped_bit_is_refused_or_nothing_rests_on_it(tmp_path):
    found = run_chaos(tmp_path, "--only", "flips", "--flips", "3")
    (campaign,) = found["campaigns"]
    assert len(campaign["trials"]) == 3


@pytest.mark.long
@pytest.mark.timeout(700)
def test_two_releases_train_together_and_take_over_each_others_data(tmp_path):
    try:
        release_before.require_history()
    except NoReleaseBeforeError as error:
        pytest.skip(str(error))
    words = ["--only", "releases", "--kills", "18", "--workers", "2", "--pause", "0.1", "--output", str(tmp_path)]
    run = subprocess.run([sys.executable, "-m", "verify", *words], capture_output=True, text=True, timeout=690)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "chaos.json").read_text())
    totals, faults = found["totals"], found["faults"]
    assert totals["sent"] == totals["acknowledged"] == totals["applied"] > 0
    assert (totals["different"], totals["compared"] > 0) == (0, True)
    assert (faults["shards updated"], faults["shards taken back"], faults["models read"]) == (2, 1, 2)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_feed_is_one_model_that_was_published_whatever_dies(tmp_path):
    words = ["--only", "feeds", "--faults", "12", "--output", str(tmp_path)]
    run = subprocess.run([sys.executable, "-m", "verify", *words], capture_output=True, text=True, timeout=290)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "chaos.json").read_text())
    feeds = found["feeds"]
    assert min(feeds[name] for name in ("acknowledged", "versions", "claims", "looks", "downloads")) > 0
    assert not any(feeds[name] for name in ("nobodys", "mixed", "renamed", "lost", "went_back", "late"))
    assert found["faults"]["servers killed"] >= 5


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(filesystem.why_not()), reason=f"no file system: {filesystem.why_not()}")
def test_a_power_cut_takes_no_more_than_the_mode_allows(tmp_path):
    words = ["--only", "power-cuts", "--cuts", "12", "--output", str(tmp_path)]
    run = subprocess.run([sys.executable, "-m", "verify", *words], capture_output=True, text=True, timeout=290)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert found["faults"]["power cuts"] == found["cuts"]["cuts"] == 12
    assert [campaign["name"].split()[-1] for campaign in found["campaigns"]] == ["always", "interval", "never"]
    assert min(found["cuts"][name] for name in ("acknowledged", "compared", "repeated")) > 0
    always = found["campaigns"][0]["cuts"][0]
    assert (always["gone"], always["lost"]) == (0, 0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_copies_and_mixed_backups_leave_no_wrong_replica_and_are_named(tmp_path):
    words = ["--only", "backups", "--rounds", "1", "--workers", "2", "--pause", "0.1", "--output", str(tmp_path)]
    run = subprocess.run([sys.executable, "-m", "verify", *words], capture_output=True, text=True, timeout=590)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert found["faults"]["shards restored from a copy"] == 6
    assert (found["totals"]["compared"], found["totals"]["different"]) == (4, 0)
