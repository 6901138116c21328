"""What gRPC logs by itself: few lines a minute, and none for a client that has gone."""

import logging

import pytest
from grpc._cython import cygrpc

from psservice.rpc import ports

LOG = logging.getLogger("grpc._cython.cygrpc")


def raised(error):
    try:
        raise error
    except type(error):
        LOG.exception("raised by servicer method [/sparseps.v1.ParameterServerService/PushSparse]")


@pytest.fixture(autouse=True)
def new_minute():
    ports._lines_of_minute.clear()


def test_a_client_that_goes_while_the_end_of_its_call_is_sent_is_no_error(caplog):
    raised(cygrpc.ExecuteBatchError('Failed "execute_batch": (SendStatusFromServerOperation,)'))
    assert not caplog.records
    raised(ValueError("headers that are no UTF-8"))
    assert len(caplog.records) == 1


def test_nobody_makes_grpc_fill_the_log(caplog):
    for _ in range(100):
        raised(ValueError("headers that are no UTF-8"))
    assert 0 < len(caplog.records) <= 2 * ports._LINES_A_MINUTE  # a minute may end in between
