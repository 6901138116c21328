"""``psservice`` whose clock is wrong and whose disk fails: ``python -m verify.failpoint.serve CLOCK SYNCS serve …``.

``CLOCK`` is the file of :mod:`verify.failpoint.skewed_clock`, ``SYNCS`` that of :mod:`verify.failpoint.failed_syncs`.
"""

import faulthandler
import sys
from pathlib import Path

from verify.failpoint import failed_syncs, skewed_clock


def main() -> int:
    """Set both up, then become the server; where it hangs, SIGABRT shows at what."""
    faulthandler.enable()
    skewed_clock.install(Path(sys.argv[1]))
    failed_syncs.install(Path(sys.argv[2]))
    from psservice.cli.main import main as serve

    return serve(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
