"""``psservice serve --help``: every flag in the group where it is looked for."""

import re

import pytest

from psservice.settings import ServerSettings, load


def help_of(capsys, command="serve"):
    with pytest.raises(SystemExit) as ended:
        load(["--help"], command)
    assert ended.value.code == 0
    return capsys.readouterr().out


def groups_of(text):
    """The flags by the title of their group."""
    found, title = {}, ""
    for line in text.splitlines():
        if re.fullmatch(r"[a-z].*:", line):
            title = line.removesuffix(":")
        elif flag := re.match(r"  (--[a-z-]+)", line):
            found.setdefault(title, []).append(flag[1].removeprefix("--").replace("-", "_"))
    return found


def test_every_flag_is_in_a_group(capsys):
    groups = groups_of(help_of(capsys))
    assert sorted(name for names in groups.values() for name in names) == sorted(ServerSettings.model_fields)
    assert 8 < len(groups) < 16
    assert next(iter(groups)) == "settings from a file"
    assert max(map(len, groups.values())) < 16
    assert groups["durability"][0] == "data_dir"
    assert {"listen", "tls_cert", "tokens", "certificate_roles", "insecure"} <= {*groups["addresses, and who may call"]}
    assert "audit_log" in groups["log and process"]


def test_a_value_has_a_placeholder_with_its_unit(capsys):
    text = help_of(capsys)
    assert "--lease-seconds DURATION" in text
    assert "--memory-bytes SIZE" in text
    assert "--of HOST:PORT" in help_of(capsys, "relay")
