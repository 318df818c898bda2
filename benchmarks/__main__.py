"""Run every benchmark (`make bench`): decode attention, serving, a pool that is too small."""

from __future__ import annotations

import sys

from benchmarks import decode_attention, pressure, serving
from scripts.demo import find_surrogate


def main() -> None:
    surrogate = str(find_surrogate(None))
    for title, run, arguments in (
        ("decode attention", decode_attention.main, []),
        ("serving", serving.main, ["--surrogate", surrogate]),
        ("pressure", pressure.main, ["--surrogate", surrogate]),
    ):
        print(f"\n== {title}", flush=True)
        sys.argv = [title, *arguments]
        run()


if __name__ == "__main__":
    main()
