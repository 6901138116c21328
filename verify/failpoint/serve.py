"""``psservice`` on a machine with faults: ``python -m verify.failpoint.serve CLOCK SYNCS BOOT serve …``.

``CLOCK`` is the file of :mod:`verify.failpoint.skewed_clock`, ``SYNCS`` that of :mod:`verify.failpoint.failed_syncs`,
``BOOT`` that of :mod:`verify.failpoint.boots`.
"""

import faulthandler
import sys
from pathlib import Path

from verify.failpoint import boots, failed_syncs, skewed_clock


def main() -> int:
    """Set all up, then become the server; where it hangs, SIGABRT shows at what."""
    faulthandler.enable()
    skewed_clock.install(Path(sys.argv[1]))
    failed_syncs.install(Path(sys.argv[2]))
    boots.install(Path(sys.argv[3]))
    from psservice.cli.main import main as serve

    return serve(sys.argv[4:])


if __name__ == "__main__":
    sys.exit(main())
