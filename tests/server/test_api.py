"""Every way to start a press, and what the server tells about it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import requests
import torch

from kvzap_sglang.observe import unpack_kept
from kvzap_sglang.presses.base import LayerInput
from kvzap_sglang.presses.random import RandomPress
from tests.servers import BASE_FLAGS, Server, environment, model_path, serve
from tests.surrogates import make_surrogate
from tests.workloads import tokens

pytestmark = pytest.mark.server

TINY = "tiny-qwen3-random"
LAYERS, HEADS = 2, 2


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose press comes from a YAML file: random, half removed, two sinks, window 16."""
    folder = tmp_path_factory.mktemp("configured")
    config = folder / "press.yaml"
    config.write_text(
        textwrap.dedent(
            """\
            kv-press: random
            kv-press-threshold: -0.6931
            kv-press-window: 16
            kv-press-sinks: 2
            max-total-tokens: 2048
            chunked-prefill-size: 64
            dtype: float32
            """
        )
    )
    with serve(model_path(TINY), folder / "server.log", "--config", str(config)) as server:
        yield server


def test_config_file_reaches_the_server(configured: Server) -> None:
    info = configured.press_info()
    assert info["config"]["kv_press"] == "random"
    assert info["config"]["kv_press_window"] == 16
    assert info["digest"] == "random"
    assert info["physical_tokens"] == 2048
    assert info["virtual_tokens"] == 4 * 2048
    assert info["cells_total"] == 2048 * LAYERS * HEADS


def test_random_press_keeps_the_predicted_set(configured: Server) -> None:
    configured.flush()
    prompt = tokens(random.Random(5), 300)
    answer = configured.generate(prompt, 40, custom={"return_kept": True})
    held = (prompt + answer["output_ids"])[:-1]
    positions, ids = torch.arange(len(held)), torch.tensor(held)
    press = RandomPress(HEADS)
    scores = torch.stack(
        [press.score(layer, LayerInput(torch.empty(len(held), 0), positions, ids)) for layer in range(LAYERS)], dim=1
    )
    expected = ((scores >= -0.6931) | (positions[:, None, None] < 2)).numpy()
    stats = answer["meta_info"]["kv_press"]
    assert np.array_equal(unpack_kept(stats), expected)
    assert stats["kept_cells"] == expected[:-16].sum() + 16 * LAYERS * HEADS
    info = configured.press_info()
    assert info["cells_tree"] == stats["kept_cells"] == info["cells_total"] - info["cells_free"]


def test_without_return_kept_no_bits_are_sent(configured: Server) -> None:
    stats = configured.generate([7, 8, 9], 2)["meta_info"]["kv_press"]
    assert set(stats) == {"kept_fraction", "kept_cells", "dense_cells", "window"}
    with pytest.raises(KeyError, match="return_kept"):
        unpack_kept(stats)


def test_streaming_answers_carry_the_statistics_once(configured: Server) -> None:
    body = {"input_ids": [5, 6, 7], "stream": True, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
    with requests.post(f"{configured.url}/generate", json=body, stream=True, timeout=60) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: ")]
    chunks = [json.loads(line) for line in lines if line != b"[DONE]"]
    assert len(chunks) > 1
    assert all("kv_press" not in chunk["meta_info"] for chunk in chunks[:-1])
    assert chunks[-1]["meta_info"]["kv_press"]["dense_cells"] == 8 * LAYERS * HEADS


def test_openai_chat_carries_the_statistics(configured: Server) -> None:
    client = openai.OpenAI(base_url=f"{configured.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=3,
        extra_body={"return_meta_info": True},
    )
    assert (answer.choices[0].model_extra or {})["meta_info"]["kv_press"]["window"] == 16


def test_side_buffers_stay_small(configured: Server) -> None:
    """Table and free stack per cell, scaled to a bf16 pool of head dim 128."""
    info = configured.press_info()
    sizes = info["buffer_bytes"]
    side = sum(size for name, size in sizes.items() if name not in ("k", "v"))
    share = side / info["cells_total"] / (2 * 128 * 2)
    assert share <= 0.008 * info["config"]["kv_press_headroom"] + 0.01
    assert "side buffers" in configured.log()


def test_sglang_serve(tmp_path: Path) -> None:
    """The recommended entry point takes the same flag."""
    from kvzap_sglang.local_server import free_port, stop

    port = free_port()
    log = tmp_path / "serve.log"
    entry = str(Path(sys.executable).with_name("sglang"))
    command = [entry, "serve", "--model-path", model_path(TINY), "--port", str(port), *BASE_FLAGS]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--kv-press", "streaming", "--max-total-tokens", "1024", "--dtype", "float32"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment()},
            start_new_session=True,
        )
    try:
        from kvzap_sglang.local_server import LocalServer, wait_until_healthy

        wait_until_healthy(LocalServer(f"http://127.0.0.1:{port}", log, process), progress=False)
        server = Server(f"http://127.0.0.1:{port}", log, process)
        stats = server.generate(tokens(random.Random(1), 300), 4)["meta_info"]["kv_press"]
        assert stats["kept_cells"] == (129 + 4) * LAYERS * HEADS
    finally:
        stop(process)


ENGINE_SCRIPT = """
import json, sys
from kvzap_sglang.engine import KVPressEngine

if __name__ == "__main__":
    engine = KVPressEngine(
        model_path=sys.argv[1], device="cpu", dtype="float32", max_total_tokens=1024, skip_server_warmup=True,
        kv_press="kvzap", kv_press_model=sys.argv[2], kv_press_threshold=float("inf") if len(sys.argv) > 3 else 0.0,
    )
    answer = engine.generate(input_ids=list(range(100, 400)), sampling_params={"max_new_tokens": 4, "temperature": 0})
    print("ANSWER " + json.dumps(answer["meta_info"]["kv_press"]))
    engine.shutdown()
"""


def run_engine(tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    make_surrogate(tmp_path / "s", hidden=64, layers=LAYERS, kv_heads=HEADS)
    script = tmp_path / "engine.py"
    script.write_text(ENGINE_SCRIPT)
    command = [sys.executable, str(script), model_path(TINY), str(tmp_path / "s"), *more]
    env = {**os.environ, **environment()}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_python_engine(tmp_path: Path) -> None:
    result = run_engine(tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("ANSWER "))
    stats = json.loads(line.removeprefix("ANSWER "))
    assert stats["dense_cells"] == 303 * LAYERS * HEADS
    assert 0 < stats["kept_cells"] < stats["dense_cells"]


def test_python_engine_refuses_bad_options(tmp_path: Path) -> None:
    result = run_engine(tmp_path, "bad")
    assert result.returncode != 0
    assert "KVPressConfigError" in result.stderr and "--kv-press-threshold" in result.stderr


def test_doctor() -> None:
    entry = str(Path(sys.executable).with_name("kvzap-sglang"))
    result = subprocess.run([entry, "doctor"], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok    ") == 6
