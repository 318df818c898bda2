"""Run every benchmark (`make bench`): decode attention, then serving. About 15 minutes on two cores."""

from __future__ import annotations

import sys

from benchmarks import decode_attention, serving
from scripts.demo import find_surrogate


def main() -> None:
    surrogate = str(find_surrogate(None))
    for title, run, arguments in (
        ("decode attention", decode_attention.main, []),
        ("serving", serving.main, ["--surrogate", surrogate]),
    ):
        print(f"\n== {title}", flush=True)
        sys.argv = [title, *arguments]
        run()


if __name__ == "__main__":
    main()
