"""The press configuration: one model for CLI flags, YAML, environment and the Python API."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvzap_sglang.surrogates import shipped_surrogate

PressName = Literal["kvzap", "streaming", "random"]

# NVIDIA's published surrogate and the paper's threshold for it (arXiv 2601.07891, table 2),
# by the last component of the model path. For SmolLM2 our own, at the threshold in its config.json.
KNOWN_PAIRS: Mapping[str, tuple[str, float | None]] = {
    "Qwen3-8B": ("nvidia/KVzap-mlp-Qwen3-8B", -4.0),
    "Qwen3-32B": ("nvidia/KVzap-mlp-Qwen3-32B", -4.0),
    "Llama-3.1-8B-Instruct": ("nvidia/KVzap-linear-Llama-3.1-8B-Instruct", -7.0),
    "SmolLM2-135M-Instruct": (str(shipped_surrogate("mlp", "SmolLM2-135M-Instruct")), None),
}
# Attention sinks that a baseline press keeps unless told otherwise: without them both
# baselines collapse for a reason that has nothing to do with what they are compared on.
BASELINE_SINKS = 4


class KVPressConfigError(ValueError):
    """A press option that cannot be served; the text names the flag and the remedy."""


class KVPressConfig(BaseModel):
    """How a server prunes its KV cache. Field names are flag names with `-` for `_`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    kv_press: PressName = Field(description="Scoring policy that prunes the KV cache.")
    kv_press_model: str | None = Field(
        None,
        description="Surrogate in kvpress format (folder or hub id). Known models have a default.",
    )
    kv_press_threshold: float | None = Field(
        None,
        description="Pairs scoring below it (natural log) leave memory outside the window; -inf keeps all.",
    )
    kv_press_window: int = Field(128, ge=0, description="Most recent positions that are never pruned.")
    kv_press_prefill: Literal["dense", "sparse"] = Field(
        "dense", description="Whether a prompt's own tokens see each other densely or by the decode rule."
    )
    kv_press_decode: Literal["prune", "keep"] = Field(
        "prune", description="What becomes of generated tokens: pruned as a prompt's are, or all kept."
    )
    kv_press_headroom: float = Field(
        4.0, ge=1.0, le=64.0, description="Virtual capacity (token slots) over physical capacity."
    )
    kv_press_sinks: int | None = Field(
        None,
        ge=0,
        description="First positions that are always kept (kvzap: 0; streaming and random: 4).",
    )
    kv_press_hit_window: Literal["recompute", "accept"] = Field(
        "recompute", description="What a request does that branches where its window is already pruned."
    )
    kv_press_attention: Literal["auto", "triton", "flashinfer", "cpu"] = Field(
        "auto",
        description="Kernels that attend: triton on a GPU, flashinfer for its dense prompts, cpu (C++) on a CPU.",
    )
    kv_press_lock: bool = Field(False, description="Refuse requests that choose their own threshold.")

    @field_validator("kv_press_threshold")
    @classmethod
    def _threshold_is_a_number(cls, value: float | None) -> float | None:
        if value is not None and (math.isnan(value) or value == math.inf):
            raise ValueError(f"{value} is no threshold: give a finite number, or -inf to keep everything")
        return value

    @field_validator("kv_press_headroom")
    @classmethod
    def _headroom_is_finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("give a finite factor between 1 and 64")
        return value

    @model_validator(mode="after")
    def _fits_the_press(self) -> KVPressConfig:
        if self.kv_press != "kvzap" and self.kv_press_model is not None:
            raise ValueError(f"--kv-press-model is only read by --kv-press kvzap, not by {self.kv_press}: remove it")
        if self.kv_press == "streaming" and self.kv_press_threshold not in (None, -math.inf):
            raise ValueError(
                "--kv-press-threshold means nothing to --kv-press streaming (it keeps the window and the "
                "sinks): remove it, or give -inf to keep everything"
            )
        if self.kv_press == "random" and self.kv_press_threshold is None:
            raise ValueError(
                "--kv-press random needs --kv-press-threshold T: it removes the fraction exp(T), "
                "for instance -0.69 for one half"
            )
        if self.kv_press == "random" and (self.kv_press_threshold or 0.0) > 0.0:
            raise ValueError("--kv-press-threshold of --kv-press random must be <= 0 (it removes exp(T))")
        return self

    @property
    def sinks(self) -> int:
        """Positions below this are always kept."""
        if self.kv_press_sinks is not None:
            return self.kv_press_sinks
        return 0 if self.kv_press == "kvzap" else BASELINE_SINKS

    @property
    def threshold(self) -> float:
        """The resolved threshold (call `resolved_for` first)."""
        if self.kv_press == "streaming" and self.kv_press_threshold is None:
            return math.inf
        if self.kv_press_threshold is None:
            raise KVPressConfigError("--kv-press-threshold is not resolved yet")
        return self.kv_press_threshold

    @property
    def surrogate(self) -> str:
        """The resolved surrogate path or hub id (kvzap only)."""
        if self.kv_press_model is None:
            raise KVPressConfigError("--kv-press-model is not resolved yet")
        return self.kv_press_model

    def resolved_for(self, model_path: str) -> KVPressConfig:
        """Fill surrogate and threshold from the known pairs or the surrogate's own config.

        Raises `KVPressConfigError` naming the missing flag.
        """
        if self.kv_press != "kvzap":
            return self
        known = KNOWN_PAIRS.get(os.path.basename(os.path.normpath(model_path)))
        surrogate, threshold = self.kv_press_model, self.kv_press_threshold
        if surrogate is None:
            if known is None:
                raise KVPressConfigError(
                    f"--kv-press kvzap has no default surrogate for {model_path!r}: give one with "
                    f"--kv-press-model PATH_OR_HUB_ID (defaults exist for {', '.join(sorted(KNOWN_PAIRS))})"
                )
            surrogate, threshold = known[0], known[1] if threshold is None else threshold
        if threshold is None:
            from kvzap_sglang.presses.surrogate import read_config

            threshold = read_config(surrogate).default_threshold
        if threshold is None and known is not None and surrogate == known[0]:
            threshold = known[1]
        if threshold is None:
            raise KVPressConfigError(
                f"the surrogate {surrogate!r} carries no default_threshold: give one with "
                "--kv-press-threshold FLOAT (typically -6 to -3; -inf keeps everything)"
            )
        return self.model_copy(update={"kv_press_model": surrogate, "kv_press_threshold": threshold})


def flag_name(field: str) -> str:
    """`kv_press_model` -> `--kv-press-model`."""
    return "--" + field.replace("_", "-")


def environment_name(field: str) -> str:
    """`kv_press_model` -> `KV_PRESS_MODEL`."""
    return field.upper()


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Options given as environment variables (a flag of the same name wins)."""
    names = {field: environment_name(field) for field in KVPressConfig.model_fields}
    return {field: environ[name] for field, name in names.items() if environ.get(name)}


def build_config(options: Mapping[str, Any]) -> KVPressConfig | None:
    """Options (None = not given) -> configuration, or None when no press is asked for.

    Raises `KVPressConfigError` with one line per fault, each naming its flag.
    """
    given = {field: value for field, value in options.items() if value is not None}
    if "kv_press" not in given:
        if given:
            flags = ", ".join(flag_name(field) for field in sorted(given))
            raise KVPressConfigError(f"{flags} given without --kv-press: add --kv-press kvzap, or remove it")
        return None
    try:
        return KVPressConfig.model_validate(given)
    except ValidationError as error:
        raise KVPressConfigError("\n".join(_explain(fault) for fault in error.errors())) from error


def _explain(fault: Any) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    location = fault["loc"]
    return f"{flag_name(str(location[0]))}: {message}" if location else message
