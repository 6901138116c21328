"""Commands print tables, JSON or YAML, and a shell completes their words."""

import json
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.system.operating.asking import run, run_json

PROGRAMS = {
    "psservice": {
        "psservice che": {"checkpoint"},
        "psservice checkpoint exp": {"export"},
        "psservice serve --fsync-i": {"--fsync-interval-seconds"},
        "psservice status --out": {"--output"},
        "psservice status --output ": {"table", "json", "yaml"},
        "psservice relay --of": {"--of"},
    },
    "psclient": {"psclient fol": {"follow"}, "psclient save --tls-s": {"--tls-server-name"}},
}
COMPLETE = """
source "$1"
COMP_WORDS=($2); [[ $2 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_shtab_%s "${COMP_WORDS[0]}" "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$COMP_CWORD - 1]}"
printf '%%s\\n' "${COMPREPLY[@]}"
"""


def test_yaml_has_what_json_has(two_shards, worker, capsys):
    for words in (["workers", two_shards.server], ["checkpoint", "list", two_shards.server]):
        code, found = run_json(capsys, *words)
        code_of_yaml, printed = run(capsys, *words, "-o", "yaml")
        again = yaml.safe_load(printed.out)
        assert (code, found.keys()) == (code_of_yaml, again.keys())
        assert json.dumps(again)
    assert again == found


def test_top_prints_a_document_a_frame(two_shards, worker, capsys):
    code, printed = run(capsys, "top", two_shards.server, "--once", "-o", "yaml", "--interval-seconds", "0.1")
    (frame,) = yaml.safe_load_all(printed.out)
    assert code == 0
    assert [shard["shard_index"] for shard in frame["shards"]] == [0, 1]


def test_a_table_is_the_default_and_another_form_is_wrong_usage(two_shards, capsys):
    assert run(capsys, "workers", two_shards.server, "-o", "table") == run(capsys, "workers", two_shards.server)
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "workers", two_shards.server, "-o", "xml")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
@pytest.mark.parametrize("program", PROGRAMS)
def test_bash_completes_commands_and_flags(program, tmp_path):
    script = subprocess.run([sys.executable, "-m", program, "completion", "bash"], capture_output=True, text=True)
    assert script.returncode == 0, script.stderr
    (tmp_path / "script").write_text(script.stdout)
    for typed, expected in PROGRAMS[program].items():
        shell = ["bash", "-c", COMPLETE % program, "bash", str(tmp_path / "script"), typed]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
        assert set(done.stdout.split()) == expected, (typed, done.stderr)


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_have_a_script_of_theirs(shell, capsys):
    code, printed = run(capsys, "completion", shell)
    assert code == 0
    assert "checkpoint" in printed.out
