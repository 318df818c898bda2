"""The console script `kvzap-sglang`."""

from __future__ import annotations

import argparse
import sys

from kvzap_sglang.doctor import run_doctor


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvzap-sglang", description="KV cache pruning inside SGLang.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="check that the press can be installed here, without a server")
    parser.parse_args(argv)
    return run_doctor(sys.stdout)
