"""The command ``psclient``."""

import pytest

from psclient.cli import main


@pytest.mark.parametrize("seconds", ["nan", "inf", "-3", "0", "soon"])
def test_the_time_to_try_is_a_number_of_seconds_above_zero(seconds, capsys, tmp_path):
    with pytest.raises(SystemExit) as ending:
        main(["save", "127.0.0.1:1", "--out", str(tmp_path / "model.safetensors"), f"--timeout={seconds}"])
    assert ending.value.code == 2
    assert "--timeout" in capsys.readouterr().err
