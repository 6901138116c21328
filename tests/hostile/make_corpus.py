"""Writes corpus/ from the tables of lies; ``--check`` only compares.

    python -m tests.hostile.make_corpus

Every byte is put together here or in the tables, by none of the encoders that are under test, so that a change of an
encoder changes no file. What a fuzzer found has no other source than its file, and is left alone.
"""

import sys

from tests.hostile.corpus_files import CORPUS, FOUND, Hostile
from tests.hostile.index_lies import index_lies
from tests.hostile.value_lies import value_lies


def made() -> list[Hostile]:
    """Return every file as it should be."""
    return [*index_lies(), *value_lies()]


def main() -> int:
    """Write, or compare; return the exit status."""
    wanted = {each.path: each.text for each in made()}
    there = {path for path in CORPUS.glob("*/*.textproto") if not path.name.startswith(FOUND)}
    if "--check" in sys.argv[1:]:
        wrong = [path for path, text in wanted.items() if path not in there or path.read_text() != text]
        wrong += sorted(there - set(wanted))
        for path in wrong:
            print(f"{path.relative_to(CORPUS)} is not as make_corpus.py makes it", file=sys.stderr)
        return bool(wrong)
    for path in there - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"{len(wanted)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
