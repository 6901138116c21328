"""``python -m tools.container_test``: exit status 0 passed, 1 failed, 77 cannot be run here, 130 interrupted."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from tools.container_test import __doc__ as about
from tools.container_test import needs
from tools.container_test.machine import ROOT, SKIPPED, SkippedError, say, stage, work_folder

OVERLAY = ROOT / "deploy" / "kubernetes" / "overlays" / "cpu-dev"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.container_test", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--overlay", type=Path, default=OVERLAY, metavar="DIR", help="other manifests than cpu-dev's")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        needs.check()
        with work_folder() as work:
            say("stage 1 of 2: the image")
            status = stage("image", work, network=False)
            if status == 0:
                say(f"stage 2 of 2: the pods of {options.overlay}")
                status = stage("pods", work, options.overlay, network=True)
    except SkippedError as error:
        print(f"container test skipped: {error}", flush=True)
        return SKIPPED
    except KeyboardInterrupt:
        print("container test interrupted; nothing of it is left", file=sys.stderr)
        return 130
    if status == 0:
        say("container test passed")
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
