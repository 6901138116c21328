"""Durations and sizes with their units: in flags, variables and files of settings."""

import argparse
import math

import pytest

from psclient.errors import ConfigurationError
from psclient.settings import ClientSettings
from pscore.units import parse_bytes, parse_seconds, positive_seconds, seconds_or_zero
from psservice.settings import ServerSettings, SettingsError, load


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15", 15.0),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("500ms", 0.5),
        ("15s", 15.0),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        (" 5m ", 300.0),
        ("0", 0.0),
        ("-1", -1.0),
    ],
)
def test_a_duration_is_a_number_of_seconds_or_has_units(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "x", "5 m", "5M", "5min", "m", "1h 30m", "5,0s", "-5m", "1" * 50, "5m x"])
def test_what_is_no_duration_is_refused_with_the_units(text):
    with pytest.raises(ValueError, match=r"is no duration: give a number of seconds, .*15s"):
        parse_seconds(text)
    with pytest.raises(argparse.ArgumentTypeError, match="15s"):
        seconds_or_zero(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("64Ki", 65536),
        ("512Mi", 512 << 20),
        ("1Gi", 1 << 30),
        ("1GiB", 1 << 30),
        ("2Ti", 2 << 40),
        ("64k", 64_000),
        ("500M", 500_000_000),
        ("1G", 10**9),
        ("1GB", 10**9),
        ("1T", 10**12),
        ("1.5Gi", 3 << 29),
        ("0.001k", 1),
        ("10B", 10),
        ("1_000_000", 1_000_000),
    ],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "1.5", "1gi", "1 Gi", "1KB", "Gi", "-1Gi", "1e9", "0.3Ki", "1" * 50, "1GiX"])
def test_what_is_no_size_is_refused_with_the_units(text):
    with pytest.raises(ValueError, match=r"is no size: give a number of bytes, .*1Gi"):
        parse_bytes(text)


def test_settings_take_units_from_flags_variables_and_files(tmp_path, monkeypatch):
    (tmp_path / "settings.yaml").write_text("drain_seconds: 1m30s\nlease_seconds: 20\nmemory_bytes: 8Gi\n")
    monkeypatch.setenv("PSSERVICE_SNAPSHOT_SECONDS", "5m")
    monkeypatch.setenv("PSSERVICE_STREAM_SECONDS", "7200")
    loaded = load(["--config", str(tmp_path / "settings.yaml"), "--journal-bytes", "2Gi", "--cut-seconds=500ms"])
    assert (loaded.drain_seconds, loaded.lease_seconds, loaded.memory_bytes) == (90.0, 20.0, 8 << 30)
    assert (loaded.snapshot_seconds, loaded.stream_seconds) == (300.0, 7200.0)
    assert (loaded.journal_bytes, loaded.cut_seconds) == (2 << 30, 0.5)
    monkeypatch.setenv("PSCLIENT_PATIENCE_SECONDS", "10m")
    monkeypatch.setenv("PSCLIENT_BUCKET_BYTES", "4Mi")
    mine = ClientSettings()
    assert (mine.patience_seconds, mine.bucket_bytes) == (600.0, 4 << 20)


def test_what_is_refused_names_the_setting_as_its_source_does_and_the_unit(monkeypatch):
    with pytest.raises(SettingsError, match=r"--lease-seconds: '15x' is no duration"):
        load(["--lease-seconds", "15x"])
    with pytest.raises(SettingsError, match=r"--journal-bytes: '1Zi' is no size"):
        load(["--journal-bytes=1Zi"])
    with pytest.raises(SettingsError, match=r"--lease-seconds: .* 0\.5"):
        ServerSettings(lease_seconds="100ms")
    monkeypatch.setenv("PSCLIENT_DEADLINE_SECONDS", "soon")
    with pytest.raises(ConfigurationError, match=r"PSCLIENT_DEADLINE_SECONDS: 'soon' is no duration"):
        ClientSettings()


def test_flags_of_commands_take_units():
    assert positive_seconds("2m") == 120.0
    assert seconds_or_zero("0") == 0.0
    for text in ("inf", "nan", "-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            seconds_or_zero(text)
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        positive_seconds("0s")
    assert math.isinf(parse_seconds("inf"))  # a setting has bounds of its own
