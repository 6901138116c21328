"""The quickstart's workers under Ray Train: as many as --workers, wherever Ray has room for them.

Needs ray[train] here and sparseps on every node. The server runs by itself: psservice serve.

    python examples/launchers/ray_train.py --server host:50051 --workers 4

If a worker fails, Ray starts all of them anew (--failures). They join again with the server's model, so no update that
it has acknowledged is lost. A task for each worker begins again alone: docs/guide/fine-tuning.md, "Ray".
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.data_parallel_trainer import DataParallelTrainer

EXAMPLES = Path(__file__).resolve().parent.parent


def work(config: dict[str, Any]) -> None:
    """Be one worker of the run: its number and how many there are come from Ray."""
    from quickstart_worker import Job, Progress, train  # Ray brings the folder of the examples to the node

    context = ray.train.get_context()
    number, workers = context.get_world_rank(), context.get_world_size()
    last: list[Progress] = []

    def tell(progress: Progress) -> None:
        last[:] = [progress]

    train(number, Job("dgs", config["server"], workers, config["epochs"], batch_size=32, seed=0), tell)
    # Once, at the end: a report waits for that of every other worker, and workers here wait for none.
    ray.train.report({"steps": last[0].steps, "loss": last[0].loss, "version": last[0].version})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default=os.environ.get("PSCLIENT_SERVER"), help="default: PSCLIENT_SERVER")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="N", help="a worker; Ray's trainer takes one more")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="passes over the data (default: 10)")
    parser.add_argument("--failures", type=int, default=3, metavar="N", help="to begin again after (default: 3)")
    parser.add_argument("--storage", default="~/ray_results", metavar="DIR", help="of Ray's results, on every node")
    options = parser.parse_args()
    if not options.server:
        parser.error("no server: give --server HOST:PORT or set PSCLIENT_SERVER")

    settings = {name: value for name, value in os.environ.items() if name.startswith("PSCLIENT_")}
    ray.init(runtime_env={"working_dir": str(EXAMPLES), "env_vars": settings})
    trainer = DataParallelTrainer(
        work,
        train_loop_config={"server": options.server, "epochs": options.epochs},
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.workers, resources_per_worker={"CPU": options.cpus}
        ),  # use_gpu=True: a GPU each
        run_config=ray.train.RunConfig(
            storage_path=str(Path(options.storage).expanduser()),
            failure_config=ray.train.FailureConfig(max_failures=options.failures),
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print(f"worker 0: {result.metrics['steps']} steps, loss {result.metrics['loss']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
