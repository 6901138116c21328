"""Whose line a warning is, in a program that has not configured logging; and that one which has is left alone."""

import subprocess
import sys

import pytest

WARN = """
import logging, psclient
{configure}
logging.getLogger("psclient").info("too little")
logging.getLogger("psclient").warning("%s left", "one worker")
logging.getLogger("pscore.jit").warning("loops")
"""


def lines(configure):
    """What the program writes to stderr."""
    command = [sys.executable, "-c", WARN.format(configure=configure)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stdout
    return done.stderr.splitlines()


@pytest.mark.parametrize("configure", ["", "logging.getLogger('transformers').addHandler(logging.StreamHandler())"])
def test_a_line_has_the_loggers_name_where_logging_is_not_configured(configure):
    assert lines(configure) == ["psclient: one worker left", "pscore.jit: loops"]


def test_a_program_that_configures_logging_has_each_line_once():
    assert lines("logging.basicConfig(format='%(message)s!')") == ["one worker left!", "loops!"]


def test_a_handler_of_the_program_for_this_library_has_its_lines_alone():
    configure = "logging.getLogger('psclient').addHandler(logging.StreamHandler())"
    assert lines(configure) == ["one worker left", "pscore.jit: loops"]


def test_a_program_that_wants_no_lines_has_none():
    assert lines("logging.getLogger().addHandler(logging.NullHandler())") == []
