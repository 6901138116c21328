"""The thread that keeps a worker's leases, at the end of the interpreter."""

import subprocess
import sys

LAST_JOB = """
import time
from psclient.rpc.lease_thread import LeaseThread
from pscore.wire.v1 import parameter_server_pb2 as pb

leases = LeaseThread([], pb.WorkerIdentity())
leases.start()
leases.hand_over(lambda: (time.sleep(0.5), print("done", flush=True)))
del leases
"""


def test_the_interpreter_does_not_end_under_a_thread_that_ends():
    """What the thread frees then, tensors and channels, would abort the process."""
    done = subprocess.run([sys.executable, "-c", LAST_JOB], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
