"""Run every benchmark (`make bench`): decode attention, serving, a pool that is too small."""

from __future__ import annotations

import sys

from benchmarks import decode_attention, pressure, serving


def main() -> None:
    for title, run in (
        ("decode attention", decode_attention.main),
        ("serving", serving.main),
        ("pressure", pressure.main),
    ):
        print(f"\n== {title}", flush=True)
        sys.argv = [title]
        run()


if __name__ == "__main__":
    main()
