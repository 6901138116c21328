"""Coverage-guided fuzzing of the decoders with atheris: ``make fuzz ARGS="--seconds 600"``.

Begins with the hostile corpus, with good chunks, and with what earlier runs reached (``runs/fuzz``). An input is a
Chunk message; it must be refused in the protocol's words or keep every promise, within memory, and alike by every
implementation of its codec. One that does not is written as text to ``runs/fuzz/findings``, to be mended and to become
a file of the corpus.
"""

import argparse
import random
import re
import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "fuzz"
MOST_BYTES = 16 << 10
SECONDS_A_CHUNK = 5
MOST_MEMORY_MB = 1024
NOT_INSTRUMENTED = [
    "pscore.wire.codecs.index_loops",
    "pscore.wire.codecs.value_loops",
]  # numba compiles their bytecode


def main() -> int:
    """Read the arguments, fuzz in a process of its own, and report; return the exit status."""
    parser = argparse.ArgumentParser(prog="make fuzz", description="Coverage-guided fuzzing of the decoders.")
    parser.add_argument("--seconds", type=int, default=60, help="how long (default: %(default)s)")
    parser.add_argument("--codec", default="", help="folder of the corpus to begin with, e.g. rice (default: all)")
    parser.add_argument("--keep", type=int, default=0, help="add at most so many new kinds of refusals to the corpus")
    parser.add_argument("--output", type=Path, default=RUNS, metavar="DIR", help="default: runs/fuzz")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return fuzz(arguments.codec, arguments.seconds, arguments.output)
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("atheris is missing: pip install -c constraints.txt -e '.[fuzz]'", file=sys.stderr)
        return 2
    child = [sys.executable, "-m", "tools.fuzz_codecs", "--child", *sys.argv[1:]]
    status = subprocess.run([*child, "--output", str(arguments.output.absolute())], cwd=ROOT).returncode
    print(f"{report_findings(arguments.output)} findings in {arguments.output / 'findings'}")
    if arguments.keep:
        keep(arguments.keep, arguments.output)
    return status


def fuzz(codec: str, seconds: int, runs: Path) -> int:
    """Fuzz; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["pscore.wire.codecs", "pscore.wire.frames"], exclude=NOT_INSTRUMENTED):
        from google.protobuf.message import DecodeError

        from pscore.wire.v1 import parameter_server_pb2 as pb
        from tests.hostile.corpus_files import corpus
        from tests.hostile.mutation import good_chunks, mutate, outcome
        from tests.hostile.oracle import decode_alike

    seeds = good_chunks(codec) + [each.chunk for each in corpus() if each.name.startswith(f"{codec}/" if codec else "")]

    def change(data: bytes, chance: random.Random) -> bytes:
        return atheris.Mutate(data, MOST_BYTES)

    def mutated(data: bytes, size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        try:
            chunk = pb.Chunk.FromString(data)
        except DecodeError:
            chunk = chance.choice(seeds)
        new = mutate(chunk, seeds, chance, change).SerializeToString()
        return new if len(new) <= size else data

    def try_one(data: bytes) -> None:
        try:
            chunk = pb.Chunk.FromString(data)
        except DecodeError:
            return
        outcome(chunk)
        decode_alike(chunk)

    reached, beginning = runs / "reached" / (codec or "all"), runs / "seeds" / (codec or "all")
    for folder in (reached, beginning, runs / "crashes"):
        folder.mkdir(parents=True, exist_ok=True)
    for chunk in seeds:
        data = chunk.SerializeToString()
        (beginning / f"{zlib.crc32(data):08x}").write_bytes(data)
        outcome(chunk)  # what is imported or compiled at the first use is not counted as an input's
        decode_alike(chunk)
    flags = [f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", f"-timeout={SECONDS_A_CHUNK}"]
    flags += [f"-rss_limit_mb={MOST_MEMORY_MB}", f"-artifact_prefix={runs}/crashes/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, str(reached), str(beginning)], try_one, custom_mutator=mutated)
    import tracemalloc

    tracemalloc.start()
    atheris.Fuzz()
    return 0


def report_findings(runs: Path) -> int:
    """Write every input that failed as text; return their number."""
    from google.protobuf import text_format

    from pscore.wire.v1 import parameter_server_pb2 as pb

    (runs / "findings").mkdir(parents=True, exist_ok=True)
    found = sorted((runs / "crashes").glob("*"))
    for path in found:
        text = text_format.MessageToString(pb.Chunk.FromString(path.read_bytes()))
        (runs / "findings" / f"{path.name}.textproto").write_text(text)
    return len(found)


def keep(most: int, runs: Path) -> None:
    """Add the smallest inputs with refusals that no file of the corpus has to the corpus."""
    from pscore.wire.codecs.names import READABLE_INDEX_CODECS, READABLE_VALUE_CODECS
    from pscore.wire.v1 import parameter_server_pb2 as pb
    from tests.hostile.corpus_files import corpus, found
    from tests.hostile.oracle import decode

    def kind(chunk: pb.Chunk) -> str | None:
        refusal = decode(chunk)
        readable = chunk.index_codec in READABLE_INDEX_CODECS and chunk.value_codec in READABLE_VALUE_CODECS
        if refusal is None or not readable:
            return None
        return re.sub(r"\d+", "#", refusal.detail)

    known = {kind(each.chunk) for each in corpus()} | {None}
    for path in sorted((runs / "reached").glob("*/*"), key=lambda path: path.stat().st_size):
        chunk = pb.Chunk.FromString(path.read_bytes())
        refusal, what = decode(chunk), kind(chunk)
        if refusal is None or what in known or not most:
            continue
        known.add(what)
        most -= 1
        hostile = found(chunk, refusal)
        hostile.path.write_text(hostile.text)
        print(f"kept {hostile.name}: {refusal.detail}")


if __name__ == "__main__":
    sys.exit(main())
