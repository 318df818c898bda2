"""The console script `kvzap-sglang`."""

from __future__ import annotations

import argparse
import importlib
import sys

from kvzap_sglang.doctor import run_doctor

# Imported when asked for: they take seconds. Each module has `add_arguments(parser)` and `run(args) -> exit status`.
COMMANDS = {
    "evaluate": (
        "kvzap_sglang.evaluate.command",
        "measure what pruning costs a model, against baselines that remove as much",
    ),
    "ablate": ("kvzap_sglang.evaluate.offline.command", "compare policies that the server does not offer, without one"),
    "calibrate": ("kvzap_sglang.calibrate.command", "train surrogates for a model on a corpus of your own"),
}


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="kvzap-sglang", description="KV cache pruning inside SGLang.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="check that the press can be installed here, without a server")
    asked = argv[0] if argv else None
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == asked:
            importlib.import_module(module).add_arguments(command)
    args = parser.parse_args(argv)
    if args.command == "doctor":
        return run_doctor(sys.stdout)
    status: int = importlib.import_module(COMMANDS[args.command][0]).run(args)
    return status
