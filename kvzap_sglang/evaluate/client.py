"""The server under evaluation, over HTTP: greedy, by token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests

from kvzap_sglang.evaluate.errors import EvaluationError

TOP = 20  # alternatives whose log-probabilities are asked for
_TIMEOUT = 3600.0  # seconds: a long context on a CPU, behind others


class ServerFailure(RuntimeError):
    """The server refused a request or went away; the text holds what it said."""


@dataclass(frozen=True)
class Answer:
    """`cached_tokens`: of the prompt. `kept_fraction`: of the request's pairs at its end (1 on a server without a press).

    `top`: for each position asked for, token id -> log-probability (natural) of the `TOP` best.
    """

    text: str
    output_ids: list[int]
    cached_tokens: int
    kept_fraction: float
    top: list[dict[int, float]]


class Client:
    """`url`: of the server, without a path."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def model_path(self) -> str:
        """What the server was started with. Raises EvaluationError."""
        return str(self._info()["model_path"])

    def press(self) -> dict[str, Any]:
        """`/server_info`'s report of the press. Raises EvaluationError for what is no server with a press."""
        state = self._info()["internal_states"][0]
        if "kv_press" not in state:
            raise EvaluationError(f"--url {self.url}: this server has no press. Start it with --kv-press kvzap.")
        press: dict[str, Any] = state["kv_press"]
        return press

    def _info(self) -> dict[str, Any]:
        try:
            reply = requests.get(f"{self.url}/server_info", timeout=60)
            reply.raise_for_status()
            info: dict[str, Any] = reply.json()
        except (requests.RequestException, ValueError) as error:
            raise EvaluationError(f"--url {self.url}: no SGLang server answers there ({error}). Start one.") from error
        if not info.get("internal_states"):
            raise EvaluationError(f"--url {self.url}: what answers there is no SGLang server. Give its address.")
        return info

    def generate(
        self,
        ids: Sequence[int],
        new_tokens: int,
        *,
        press: Any = None,
        extra_key: str | None = None,
        top: bool = False,
        forced_from: int | None = None,
    ) -> Answer:
        """Greedy. `press`: the request's `custom_params["kv_press"]`. `extra_key`: shares prefixes only under the same one.

        `top`: also the best alternatives of every generated token, or, with `forced_from`, of the given tokens
        `ids[forced_from:]`. Raises ServerFailure.
        """
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens}
        if press is not None:
            sampling["custom_params"] = {"kv_press": press}
        body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": sampling}
        if extra_key is not None:
            body["extra_key"] = extra_key
        if top or forced_from is not None:
            body |= {"return_logprob": True, "top_logprobs_num": TOP}
        if forced_from is not None:
            body["logprob_start_len"] = forced_from - 1
        return _answer(self._post(body), forced=forced_from is not None)

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = requests.post(f"{self.url}/generate", json=body, timeout=_TIMEOUT)
        except requests.RequestException as error:
            raise ServerFailure(f"{self.url}: the server went away ({error})") from error
        if not reply.ok:
            raise ServerFailure(f"{self.url}: {reply.status_code} {reply.text[:500]}")
        answer: dict[str, Any] = reply.json()
        finish = answer["meta_info"].get("finish_reason") or {}
        if finish.get("type") == "abort":
            raise ServerFailure(f"{self.url}: request ended by the server ({finish.get('message')})")
        return answer


def _answer(raw: dict[str, Any], *, forced: bool) -> Answer:
    meta = raw["meta_info"]
    # The first of the input's entries belongs to a token that nothing precedes.
    steps = meta.get("input_top_logprobs", [])[1:] if forced else meta.get("output_top_logprobs", [])
    top = [{int(token): float(logprob) for logprob, token, _ in step} for step in steps]
    kept = meta.get("kv_press", {}).get("kept_fraction", 1.0)
    return Answer(raw["text"], list(raw["output_ids"]), int(meta["cached_tokens"]), float(kept), top)
