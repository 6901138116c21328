"""``make simulate``: histories in virtual time, each from its seed, until one breaks a promise or all are over."""

import argparse
import sys
import time

import torch

from tests.simulator.simulation import simulate


def main() -> int:
    """Simulate the histories that are asked for; the first that breaks a promise ends it with its seed."""
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--histories", type=int, default=10_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next one has the next seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    lost_disks = simulate(options.seed, options.histories)
    rate = 60 * options.histories / (time.monotonic() - began)
    print(f"{options.histories} histories kept every promise, {rate:.0f} a minute, {lost_disks} lost disks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
