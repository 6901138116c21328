"""The flags with which an embedded server is started."""

import pytest

from psclient.rpc import local_server


class StartedError(Exception):
    """A server would be started here."""


@pytest.mark.parametrize(
    ("settings", "device"), [({}, "cpu"), ({"device": "auto"}, "auto"), ({"device": "cuda:1"}, "cuda:1")]
)
def test_a_gpu_is_for_training_unless_the_server_is_given_it(settings, device, monkeypatch):
    def spawn(flags, ready_fd, log_to):
        raise StartedError(flags)

    monkeypatch.setattr(local_server, "spawn", spawn)
    with pytest.raises(StartedError) as started:
        local_server.LocalServer(**({"device": device} if device else {}))
    assert [flag for flag in started.value.args[0] if flag.startswith("--device=")] == [f"--device={device or 'cpu'}"]
