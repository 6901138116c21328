"""``tools.walks`` counts what a request enters, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tools.walks import QUEUE_HOP, walk_of

ROOT = Path(__file__).parent.parent

CODE = """
import queue
import threading

def serve(orders):
    while (order := orders.get()) is not None:
        finish(order)

def finish(done):
    [plain(value) for value in sorted([2, 1], key=lambda value: plain(value))]
    done.set()

def plain(value):
    return value

def ask(orders):
    done = threading.Event()
    orders.put(done)
    done.wait()
"""

PROGRAM = """
import json, queue, sys, threading
sys.path.insert(0, sys.argv[1])
from tools.walks import Recorder
recorder = Recorder()
from pscore.rooms import code
orders = queue.SimpleQueue()
thread = threading.Thread(target=code.serve, args=(orders,))
thread.start()
code.ask(orders)
recorder.start()
code.ask(orders)
found = recorder.stop()
orders.put(None)
thread.join()
print(json.dumps(found))
"""


def test_own_functions_are_noted_on_every_thread_and_what_hands_over(tmp_path):
    (tmp_path / "pscore" / "rooms").mkdir(parents=True)
    for file, text in (("__init__.py", ""), ("rooms/code.py", CODE)):
        (tmp_path / "pscore" / file).write_text(text)
    answer = subprocess.run(
        [sys.executable, "-s", "-c", PROGRAM, str(tmp_path)],
        env=os.environ | {"WALKS_TREE": str(tmp_path), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    names = [name for _, name in found]
    prefix = f"pscore{os.sep}rooms{os.sep}code.py:"
    assert [name for name in names if name != QUEUE_HOP][:2] == [f"{prefix}ask", f"{prefix}finish"]
    assert set(names) == {QUEUE_HOP, f"{prefix}ask", f"{prefix}finish", f"{prefix}plain"}
    assert names.count(QUEUE_HOP) == 2  # the order, and the answer that a thread waits for
    assert len({thread for thread, _ in found}) == 2


def test_timers_are_left_out_and_hops_are_of_the_usual_request():
    tick = (1, "pscore/clock.py:tick")
    request = [(2, "a.py:f"), (2, QUEUE_HOP), (3, "a.py:g"), tick, (3, "b.py:h"), (2, "a.py:f")]
    rare = [*request, (2, "c.py:only_once")]
    walk = walk_of([request, rare, request], [[tick], [tick], []])
    assert walk.functions == ["a.py:f", "a.py:g", "b.py:h"]
    assert list(walk.figures.values()) == [2, 3, 4, 2, 1]
