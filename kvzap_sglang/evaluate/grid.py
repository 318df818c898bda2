"""The runs of an evaluation: which methods, on which server, in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, product, starmap
from pathlib import Path
from typing import Any, NamedTuple

from kvzap_sglang.evaluate.client import Client
from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.example import Example
from kvzap_sglang.evaluate.methods import Method, matched_random, matched_streaming
from kvzap_sglang.evaluate.results import FULL, Results, Setting
from kvzap_sglang.evaluate.runner import Runner
from kvzap_sglang.local_server import local_server

_SERVER_FLAGS = ("--skip-server-warmup", "--sleep-on-idle")


class Served(NamedTuple):
    """How a server prunes, apart from the press (`Setting` has the same)."""

    prefill: str
    decode: str


@dataclass(frozen=True)
class Grid:
    """What is run. `window`: of the press. `baselines`: names out of random and streaming, matched to the first surrogate."""

    model: str | None
    url: str | None
    surrogates: tuple[str | None, ...]
    thresholds: tuple[float, ...]
    baselines: tuple[str, ...]
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    reuses: tuple[str, ...]
    window: int
    parallel: int
    server_flags: tuple[str, ...]
    logs: Path

    def run(self, examples: Sequence[Example], tokenizer: Any, results: Results) -> None:
        """Ask every example of every method; what is answered already is not asked again."""
        for served in starmap(Served, product(self.prefills, self.decodes)):
            self._run(self._kvzap_methods(), examples, tokenizer, results, served)
            for length in dict.fromkeys(example.length for example in examples):
                alike = [example for example in examples if example.length == length]
                self._run(self._baseline_methods(results, served, length), alike, tokenizer, results, served)

    def _kvzap_methods(self) -> list[Method]:
        methods = [Method("full", self.surrogates[0])]
        return methods + [Method("kvzap", one, level) for one in self.surrogates for level in self.thresholds]

    def _baseline_methods(self, results: Results, served: Served, length: int) -> list[Method]:
        """Each set to remove what the first surrogate removed at each threshold of the contexts of one length."""
        methods = []
        for name in self.baselines:
            for level in self.thresholds:
                label = Method("kvzap", self.surrogates[0], level).label
                rows = [row for row in results.of(Setting(label, *served, self.reuses[0])) if row.length == length]
                removed = sum(row.removed for row in rows) / len(rows)
                tokens = round(sum(row.context_tokens for row in rows) / len(rows))
                matched = (
                    matched_random(removed, tokens, label, self.window)
                    if name == "random"
                    else matched_streaming(removed, tokens, label)
                )
                methods.append(matched)
        return methods

    def _run(
        self, methods: list[Method], examples: Sequence[Example], tokenizer: Any, results: Results, served: Served
    ) -> None:
        for flags, group in groupby(methods, key=lambda method: method.server_flags(self.window)):
            todo = [
                (method, setting)
                for method in group
                for setting in self._settings(method, served)
                if not all(results.has(setting, example.key) for example in examples)
            ]
            if todo:
                with self._server(flags, served) as client:
                    runner = Runner(client, tokenizer, results, self.parallel)
                    for method, setting in todo:
                        runner.run(examples, method, setting, method.window(self.window))

    def _settings(self, method: Method, served: Served) -> list[Setting]:
        settings = [Setting(method.label, *served, reuse) for reuse in self.reuses]
        return [setting.full for setting in settings] if method.name == FULL else settings

    @contextmanager
    def _server(self, flags: tuple[str, ...], served: Served) -> Iterator[Client]:
        """The server given by `--url`, or one of our own."""
        if self.url is not None:
            yield Client(self.url)
            return
        how = (f"--kv-press-prefill={served.prefill}", f"--kv-press-decode={served.decode}")
        own = (*how, *self.server_flags, *_SERVER_FLAGS)
        if "kvzap" in flags:  # the start wants one
            own = (f"--kv-press-threshold={self.thresholds[0]}", *own)
        name = "-".join(
            re.sub(r"[^\w.-]", "", Path(flag.split("=")[-1]).name) for flag in flags if flag != "--kv-press"
        )
        log = self.logs / f"server-{name}-{served.prefill}-{served.decode}.log"
        with local_server(str(self.model), log, [*flags, *own], progress=True) as server:
            yield Client(server.url)


def check_url(grid: Grid) -> None:
    """Raises EvaluationError for what the server of `--url` cannot do."""
    if grid.url is None:
        return
    press = Client(grid.url).press()
    config = press["config"]
    if config["kv_press"] != "kvzap":
        raise EvaluationError(f"--url {grid.url}: it runs --kv-press {config['kv_press']}; kvzap is what is evaluated.")
    if grid.baselines:
        raise EvaluationError("--baseline needs servers of its own: give --model in place of --url, or leave it out.")
    if grid.surrogates != (None,):
        raise EvaluationError(
            "--surrogate: the server of --url has its own. Give --model in place of --url, or leave it out."
        )
    for flag, asked in (("prefill", grid.prefills), ("decode", grid.decodes)):
        if asked != (config[f"kv_press_{flag}"],):
            raise EvaluationError(f"--{flag}: the server of --url runs {config[f'kv_press_{flag}']}. Give that one.")
    if config["kv_press_lock"]:
        raise EvaluationError(f"--url {grid.url}: it runs with --kv-press-lock, so no threshold can be asked of it.")
    if config["kv_press_window"] != grid.window:
        raise EvaluationError(
            f"--window {grid.window}: the server of --url has {config['kv_press_window']}. Give that one."
        )
