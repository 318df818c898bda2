"""Examples against a running server: a context once, then its questions together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, groupby, islice
from typing import Any

from tqdm import tqdm

from kvzap_sglang.evaluate import metrics
from kvzap_sglang.evaluate.agreement import kl_divergence, token_match
from kvzap_sglang.evaluate.client import Answer, Client, ServerFailure
from kvzap_sglang.evaluate.example import Example, Rendered, render
from kvzap_sglang.evaluate.methods import Method
from kvzap_sglang.evaluate.results import FULL, Results, Row, Setting
from kvzap_sglang.evaluate.tasks import own

_ATTEMPTS = 3  # to ask over a context that was evicted in between


class Runner:
    """`parallel`: contexts at once; the questions of each are asked at once too."""

    def __init__(self, client: Client, tokenizer: Any, results: Results, parallel: int) -> None:
        self.client, self.tokenizer, self.results, self.parallel = client, tokenizer, results, parallel
        self._full: dict[tuple[Setting, str], Answer] = {}

    def run(self, examples: Sequence[Example], method: Method, setting: Setting, window: int) -> None:
        """Ask what is not answered yet, with a progress bar. Raises ServerFailure."""
        missing = [example for example in examples if not self.results.has(setting, example.key)]
        contexts = [list(group) for _, group in groupby(missing, key=lambda example: example.context_name)]
        with (
            tqdm(
                total=len(missing),
                desc=setting.label,
                unit="question",
            ) as bar,
            ThreadPoolExecutor(self.parallel) as pool,
        ):
            jobs = [pool.submit(self._context, group, method, setting, window, bar) for group in contexts]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _context(self, group: list[Example], method: Method, setting: Setting, window: int, bar: Any) -> None:
        rendered = [render(self.tokenizer, example) for example in group]
        if setting.reuse == "cold" or not group[0].caches:
            removed = None
        else:
            removed = self._cache(rendered[0].context_ids, method, setting, window, group[0].context_name)
        with ThreadPoolExecutor(len(group)) as pool:
            jobs = [
                pool.submit(self._question, *pair, method, setting, window)
                for pair in zip(group, rendered, strict=True)
            ]
            for (example, prompt), job in zip(zip(group, rendered, strict=True), jobs, strict=True):
                self.results.add(self._row(example, prompt, job.result(), method, setting, removed))
                bar.update()

    def _cache(self, context_ids: list[int], method: Method, setting: Setting, window: int, extra_key: str) -> float:
        """Leave the context in the tree; the fraction of its pairs that was removed.

        `branch`: also let a request go on from there until it has left the context's window behind, pruned.
        """
        answer = self.client.generate(context_ids, 1, press=method.asked, extra_key=extra_key)
        if setting.reuse == "branch":
            passing = islice(cycle(context_ids), len(context_ids) + 2 * window + 2)
            self.client.generate(list(passing), 1, press=method.asked, extra_key=extra_key)
        return 1.0 - answer.kept_fraction

    def _question(self, example: Example, prompt: Rendered, method: Method, setting: Setting, window: int) -> Answer:
        ids = [*prompt.context_ids, *prompt.question_ids]
        own_prompt = example.metric == own.METRIC
        cold = setting.reuse == "cold"
        extra_key = example.key if cold else example.context_name
        for _ in range(_ATTEMPTS):
            answer = self.client.generate(
                ids,
                example.max_new_tokens,
                press=method.asked,
                extra_key=extra_key,
                top=own_prompt,
            )
            if cold or not example.caches or answer.cached_tokens >= len(prompt.context_ids) - window - 1:
                return answer
            self._cache(prompt.context_ids, method, setting, window, extra_key)
        raise ServerFailure(
            f"{example.key}: its context was evicted {_ATTEMPTS} times before it was asked. "
            "Give the server a larger --max-total-tokens, or --parallel 1"
        )

    def _row(
        self,
        example: Example,
        prompt: Rendered,
        answer: Answer,
        method: Method,
        setting: Setting,
        removed: float | None,
    ) -> Row:
        ids = [*prompt.context_ids, *prompt.question_ids]
        if example.metric == own.METRIC:
            score, kl = self._agreement(example, ids, answer, method, setting)
        else:
            score, kl = metrics.score(example.metric, answer.text, example.answers), None
        return Row(
            key=example.key,
            task=example.task,
            length=example.length,
            setting=setting,
            context=example.context_name,
            context_tokens=len(prompt.context_ids),
            answer=answer.text,
            score=score,
            removed=round(1.0 - answer.kept_fraction if removed is None else removed, 5),
            cached_tokens=answer.cached_tokens,
            prompt_tokens=len(ids),
            depth=example.depth,
            output_ids=answer.output_ids,
            kl=kl,
        )

    def _agreement(
        self, example: Example, ids: list[int], answer: Answer, method: Method, setting: Setting
    ) -> tuple[float, float]:
        """Token match and KL against the full cache's continuation, which is asked for if this run has not seen it."""
        place = (setting.full, example.key)
        extra_key = f"{example.key} forced" if setting.reuse == "cold" else example.context_name
        if method.label == FULL:
            self._full[place] = answer
            return 1.0, 0.0
        if place not in self._full:
            self._full[place] = self.client.generate(
                ids, example.max_new_tokens, press="off", extra_key=extra_key, top=True
            )
        full = self._full[place]
        forced = self.client.generate(
            [*ids, *full.output_ids], 1, press=method.asked, extra_key=extra_key, forced_from=len(ids)
        )
        return token_match(full.output_ids, answer.output_ids), kl_divergence(full.top, forced.top)
