"""The server's settings: where they come from, in which order, and what is refused by name."""

import pytest

from pscore.net.channels import is_loopback
from psservice.settings import SettingsError, load, shown, split_address


def test_flags_go_before_environment_before_yaml_before_defaults(monkeypatch, yaml):
    config = yaml("down_density: 0.2\nexact_limit: 0.2\nrun_id: from-yaml\n")
    monkeypatch.setenv("PSSERVICE_DOWN_DENSITY", "0.3")
    monkeypatch.setenv("PSSERVICE_EXACT_LIMIT", "0.3")
    settings = load(["--config", str(config), "--down-density", "0.4"])
    assert (settings.down_density, settings.exact_limit, settings.run_id) == (0.4, 0.3, "from-yaml")
    assert settings.chunk_bytes == 1 << 20


def test_the_environment_may_name_the_yaml_file(monkeypatch, yaml):
    monkeypatch.setenv("PSSERVICE_CONFIG", str(yaml("down_mode: topk\n")))
    assert load([]).down_mode == "topk"


def test_a_flag_may_be_given_in_either_form():
    assert load(["--end-versions=5"]).end_versions == load(["--end-versions", "5"]).end_versions == 5
    assert load(["--insecure", "--listen", "0.0.0.0:1"]).insecure


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        load([]).down_mode = "exact"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--down-density", "0"], "--down-density"),
        (["--down-density", "1.5"], "--down-density"),
        (["--down-density", "many"], "--down-density"),
        (["--exact-limit", "0"], "--exact-limit"),
        (["--down-mode", "sometimes"], "--down-mode"),
        (["--buffers", "maybe"], "--buffers"),
        (["--lease-seconds", "0.1"], "--lease-seconds"),
        (["--lease-seconds", "1e300"], "--lease-seconds"),
        (["--lease-seconds", "inf"], "--lease-seconds"),
        (["--chunk-bytes", "10"], "--chunk-bytes"),
        (["--chunk-bytes", str(4 << 20)], "--chunk-bytes"),
        (["--shard-index", "-1"], "--shard-index"),
        (["--num-shards", "0"], "--num-shards"),
        (["--shard-index", "2", "--num-shards", "2"], "--shard-index 2"),
        (["--listen", "localhost"], "'localhost'"),
        (["--listen", "127.0.0.1:70000"], "70000"),
        (["--metrics-listen", "nowhere"], "'nowhere'"),
        (["--device", "tpu"], "'tpu'"),
        (["--device", "cuda:x"], "'cuda:x'"),
        (["--end-versions", "-1"], "--end-versions"),
        (["--config", "/no/such/file.yaml"], "no such file"),
        (["--listen", "0.0.0.0"], "--listen '0.0.0.0' is not HOST:PORT"),
        (["--shards", "0"], "--shards"),
        (["--shards", "1000"], "--shards"),
        (["--shards", "4", "--num-shards", "4"], "leave out --num-shards"),
        (["--shards", "4", "--shard-index", "0"], "leave out --shard-index"),
        (["--shards", "4", "--listen", "127.0.0.1:65533"], "ports up to 65536"),
        (["--shards", "4", "--listen", "127.0.0.1:7070", "--health-listen", "127.0.0.1:7073"], "port 7073 is one of"),
        (["--shards", "4", "--listen", "127.0.0.1:7070", "--metrics-listen", "127.0.0.1:7067"], "port 7070 is one of"),
    ],
)
def test_a_bad_value_is_named(flags, named):
    with pytest.raises(SettingsError) as error:
        load(flags)
    assert named in str(error.value)


def test_every_bad_value_is_named_at_once():
    with pytest.raises(SettingsError) as error:
        load(["--down-density", "0", "--num-shards", "0"])
    assert "--down-density" in str(error.value)
    assert "--num-shards" in str(error.value)


def test_a_bad_value_of_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("PSSERVICE_DOWN_DENSITY", "7")
    with pytest.raises(SettingsError, match="PSSERVICE_DOWN_DENSITY"):
        load([])


def test_a_final_model_is_not_called_like_a_pickle():
    with pytest.raises(SettingsError, match=r"--final-model .*model\.safetensors"):
        load(["--final-model", "model.pt"])


@pytest.mark.parametrize("text", ["no_such_setting: 1\n", "- a\n- list\n", "down_density: [1\n"])
def test_a_bad_yaml_file_is_refused(yaml, text):
    with pytest.raises(SettingsError):
        load(["--config", str(yaml(text))])


def test_an_unknown_yaml_key_is_named(yaml):
    with pytest.raises(SettingsError, match="no_such_setting"):
        load(["--config", str(yaml("no_such_setting: 1\n"))])


def test_an_unknown_flag_ends_the_program():
    with pytest.raises(SystemExit):
        load(["--no-such-flag"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lsten", "127.0.0.1:1"], "--lsten: there is no such setting; did you mean --listen?"),
        (["--lsten=127.0.0.1:1"], "--lsten: there is no such setting; did you mean --listen?"),
        (["7070"], "'7070' is no flag"),
        (["--listen"], "argument --listen: expected one argument"),
    ],
)
def test_wrong_usage_is_told_in_a_line_or_two(words, told, capsys):
    with pytest.raises(SystemExit) as end:
        load(words)
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert told in printed
    assert printed.count("\n") <= 2


def test_shards_of_one_command_have_ports_in_a_row_and_one_health_port():
    settings = load(["--shards", "3", "--listen", "[::1]:7070", "--metrics-listen", "127.0.0.1:9464"])
    shards = [settings.of_shard(index) for index in range(3)]
    assert [each.listen for each in shards] == ["[::1]:7070", "[::1]:7071", "[::1]:7072"]
    assert [each.metrics_listen for each in shards] == ["127.0.0.1:9464", "127.0.0.1:9465", "127.0.0.1:9466"]
    assert [each.health_listen for each in shards] == ["127.0.0.1:0", "", ""]
    assert [(each.shard_index, each.num_shards) for each in shards] == [(0, 3), (1, 3), (2, 3)]
    assert load(["--shards", "3", "--metrics-listen", ""]).of_shard(2).metrics_listen == ""


def test_shards_are_numbered_by_the_environment_or_by_the_command(monkeypatch):
    monkeypatch.setenv("PSSERVICE_NUM_SHARDS", "1")
    assert load(["--shards", "1"]).num_shards == 1
    with pytest.raises(SettingsError, match="leave out --num-shards"):
        load(["--shards", "2"])


PUBLIC = ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "example.org:1", "127.0.0.1.example.org:1"]


@pytest.mark.parametrize("address", PUBLIC)
def test_beyond_loopback_needs_insecure(address):
    with pytest.raises(SettingsError, match="--insecure"):
        load(["--listen", address])
    assert load(["--listen", address, "--insecure"]).listen == address


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.1.2.3:1", "localhost:1", "[::1]:1"])
def test_loopback_does_not(address):
    assert load(["--listen", address]).listen == address
    assert is_loopback(split_address(address)[0])


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:port", "host:-1"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_address(address)


def test_what_is_shown_are_plain_values_where_they_are_not_the_defaults(yaml):
    config = yaml("run_id: r\ndown_mode: auto\n")
    assert shown(load(["--config", str(config)])) == {"run_id": "r", "config": str(config)}


def test_help_says_what_is_expected_in_the_users_words(capsys):
    with pytest.raises(SystemExit) as end:
        load(["--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    for flag in (
        "--listen HOST:PORT",
        "--metrics-listen HOST:PORT",
        "--init FILE",
        "--final-model FILE",
        "--device DEVICE",
        "--data-dir DIR",
        "--run-id NAME",
        "--lease-seconds DURATION",
        "--chunk-bytes SIZE",
        "--num-shards N",
        "--down-density NUMBER",
        "--down-mode {auto,exact,topk}",
        "--insecure, --no-insecure",
    ):
        assert f"  {flag}" in told
    assert not [word for line in told.splitlines() for word in line.split() if word in ("str", "int", "float", "Path")]
    assert "(default: 127.0.0.1:50051)" in told
    assert "(default: null)" not in told
    assert "(default: )" not in told
