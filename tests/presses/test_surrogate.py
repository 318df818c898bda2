"""Loading, checking and running KVzap surrogates."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvzap_sglang.presses import surrogate
from kvzap_sglang.presses.surrogate import (
    Surrogate,
    SurrogateConfig,
    SurrogateError,
    check_fits,
    load_surrogate,
    read_config,
)
from tests.surrogates import make_surrogate

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
HIDDEN, LAYERS, HEADS, MLP = 12, 3, 2, 5
Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def load(path: Path | str, dtype: torch.dtype = torch.float32) -> Surrogate:
    return load_surrogate(str(path), dtype=dtype, device="cpu")


def small(path: Path, hidden_dim: int | None = MLP, **kwargs: object) -> Path:
    return make_surrogate(path, HIDDEN, LAYERS, HEADS, hidden_dim, **kwargs)  # type: ignore[arg-type]


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(path: Path, edit: Edit) -> None:
    save_file(edit(load_file(path / "model.safetensors")), path / "model.safetensors")


def refusal(call: Callable[[], object], *parts: str) -> str:
    """The text of the SurrogateError `call` raises: one line, naming the flag, with every one of `parts`."""
    with pytest.raises(SurrogateError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for part in ("--kv-press-model", *parts):
        assert part in text
    return text


# What a good checkpoint gives


@pytest.mark.parametrize("hidden_dim", [None, MLP])
def test_scores_follow_the_formula(tmp_path: Path, hidden_dim: int | None) -> None:
    loaded = load(small(tmp_path, hidden_dim))
    raw = load_file(tmp_path / "model.safetensors")
    hidden = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
    for layer in range(LAYERS):
        if hidden_dim is None:
            expected = hidden @ raw[f"layers.{layer}.weight"].T + raw[f"layers.{layer}.bias"]
        else:
            inner = hidden @ raw[f"layers.{layer}.0.weight"].T + raw[f"layers.{layer}.0.bias"]
            inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
            expected = inner @ raw[f"layers.{layer}.2.weight"].T + raw[f"layers.{layer}.2.bias"]
        scores = loaded.score(layer, hidden)
        assert scores.shape == (7, HEADS)
        torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)


def test_gelu_is_exact_not_tanh(tmp_path: Path) -> None:
    """The two GELUs differ by up to 5e-4: enough to flip decisions, so the test must tell them apart."""
    make_surrogate(tmp_path, 1, 1, 1, 1)
    ones = {
        "layers.0.0.weight": 1.0,
        "layers.0.2.weight": 1.0,
        "layers.0.0.bias": 0.0,
        "layers.0.2.bias": 0.0,
    }
    edit_tensors(tmp_path, lambda t: {k: torch.full_like(v, ones[k]) for k, v in t.items()})
    x = torch.tensor([[-2.2]])
    exact = -2.2 * 0.5 * (1 + math.erf(-2.2 / math.sqrt(2)))
    assert load(tmp_path).score(0, x).item() == pytest.approx(exact, abs=1e-6)
    assert torch.nn.functional.gelu(x, approximate="tanh").item() != pytest.approx(exact, abs=1e-4)


def test_no_tokens_give_no_scores(tmp_path: Path) -> None:
    assert load(small(tmp_path)).score(0, torch.empty(0, HIDDEN)).shape == (0, HEADS)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("run", [torch.float32, torch.bfloat16])
def test_runs_in_the_dtype_asked_for(tmp_path: Path, stored: torch.dtype, run: torch.dtype) -> None:
    loaded = load(small(tmp_path, dtype=stored), run)
    assert {p.dtype for p in loaded.parameters()} == {run}
    assert not any(p.requires_grad for p in loaded.parameters())
    raw = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded.state_dict()["layers.1.0.weight"], raw["layers.1.0.weight"].to(run))
    assert loaded.score(0, torch.zeros(1, HIDDEN, dtype=run)).dtype == run


def test_bf16_scores_are_computed_in_bf16(tmp_path: Path) -> None:
    """As kvpress does: not in fp32 and rounded at the end, which would decide a few cells otherwise."""
    loaded = load(small(tmp_path, hidden_dim=None), torch.bfloat16)
    hidden = torch.randn(64, HIDDEN).bfloat16()
    state = loaded.state_dict()
    expected = torch.nn.functional.linear(hidden, state["layers.0.weight"], state["layers.0.bias"])
    assert torch.equal(loaded.score(0, hidden), expected)


@pytest.mark.parametrize("changes", [{"dtype": ..., "torch_dtype": "float32"}, {"dtype": ...}])
def test_dtype_field_may_have_either_name_or_be_absent(tmp_path: Path, changes: dict[str, object]) -> None:
    edit_config(small(tmp_path), **changes)
    assert load(tmp_path).config == SurrogateConfig(HIDDEN, HEADS, MLP, LAYERS)


def test_absent_hidden_dim_is_linear(tmp_path: Path) -> None:
    edit_config(small(tmp_path, hidden_dim=None), hidden_dim=...)
    assert load(tmp_path).config == SurrogateConfig(HIDDEN, HEADS, None, LAYERS)


def test_read_config_needs_no_weights(tmp_path: Path) -> None:
    small(tmp_path, default_threshold=-4)
    (tmp_path / "model.safetensors").unlink()
    assert read_config(str(tmp_path)) == SurrogateConfig(HIDDEN, HEADS, MLP, LAYERS, -4.0)


def test_digest_is_of_the_checkpoint_alone(tmp_path: Path) -> None:
    first = load(small(tmp_path / "a"))
    assert len(first.digest) == 16 and int(first.digest, 16) >= 0
    edit_config(small(tmp_path / "b"), default_threshold=-3.0, transformers_version="9")
    assert load(tmp_path / "b", torch.bfloat16).digest == first.digest
    assert load(small(tmp_path / "c", seed=1)).digest != first.digest
    one_bit = small(tmp_path / "d")
    edit_tensors(one_bit, lambda t: {**t, "layers.2.2.bias": t["layers.2.2.bias"].nextafter(torch.tensor(9.0))})
    assert load(one_bit).digest != first.digest


@pytest.mark.parametrize("hidden_dim", [None, MLP])
def test_slice_heads_gives_the_same_scores(tmp_path: Path, hidden_dim: int | None) -> None:
    whole = load(make_surrogate(tmp_path, HIDDEN, LAYERS, 4, hidden_dim))
    part = whole.slice_heads(1, 3)
    hidden = torch.randn(5, HIDDEN)
    for layer in range(LAYERS):
        torch.testing.assert_close(part.score(layer, hidden), whole.score(layer, hidden)[:, 1:3])
    assert part.config.output_dim == 2 and part.digest == whole.digest
    assert whole.config.output_dim == 4


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (1, 1), (1, 3)])
def test_slice_heads_outside_is_refused(tmp_path: Path, start: int, stop: int) -> None:
    loaded = load(small(tmp_path))
    refusal(lambda: loaded.slice_heads(start, stop), f"{start} to {stop}", "--tp-size")


@pytest.mark.parametrize(("kind", "hidden_dim"), [("mlp", 72), ("linear", None)])
def test_loads_what_kvpress_wrote(kind: str, hidden_dim: int | None) -> None:
    folder = DATA / f"KVzap-{kind}-SmolLM2-135M-Instruct"
    if not folder.is_dir():
        pytest.skip(f"development data {folder} is absent")
    loaded = load(folder)
    assert loaded.config == SurrogateConfig(576, 3, hidden_dim, 30)
    assert torch.isfinite(loaded.score(29, torch.randn(4, 576))).all()


# What is refused


def test_missing_folder() -> None:
    refusal(lambda: load("./no/such/folder"), "./no/such/folder", "no such folder", "hub id")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    small(tmp_path)
    refusal(lambda: load(tmp_path / "model.safetensors"), "this is a file", "Give the folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file(tmp_path: Path, name: str) -> None:
    (small(tmp_path) / name).unlink()
    refusal(lambda: load(tmp_path), f"has no {name}")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "surrogate.pt", "surrogate.pth"])
def test_pickles_are_refused_unread(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / name)
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    refusal(lambda: load(tmp_path), name, "Convert it to safetensors")


@pytest.mark.parametrize("text", ["{", "", "\x00", "[" * 100_000, '"text"', "[1]"])
def test_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (small(tmp_path) / "config.json").write_text(text)
    refusal(lambda: read_config(str(tmp_path)), "config.json is not")


def test_config_that_is_no_text(tmp_path: Path) -> None:
    (small(tmp_path) / "config.json").write_bytes(b"\xff\xfe\x80")
    refusal(lambda: read_config(str(tmp_path)), "config.json is not valid JSON")


@pytest.mark.parametrize("key", ["input_dim", "output_dim", "n_modules"])
def test_missing_field(tmp_path: Path, key: str) -> None:
    edit_config(small(tmp_path), **{key: ...})
    refusal(lambda: read_config(str(tmp_path)), f"lacks {key}")


@pytest.mark.parametrize("key", ["input_dim", "output_dim", "n_modules", "hidden_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_sizes_must_be_positive_whole_numbers(tmp_path: Path, key: str, value: object) -> None:
    edit_config(small(tmp_path), **{key: value})
    refusal(lambda: read_config(str(tmp_path)), f"{key} = {value!r}")


def test_config_of_a_language_model(tmp_path: Path) -> None:
    edit_config(small(tmp_path), model_type="llama")
    refusal(lambda: read_config(str(tmp_path)), "'llama'", "--model-path")


@pytest.mark.parametrize("value", [math.nan, -math.inf, "-4", True, [1], 10**400])
def test_default_threshold_must_be_finite(tmp_path: Path, value: object) -> None:
    edit_config(small(tmp_path), default_threshold=value)
    refusal(lambda: read_config(str(tmp_path)), "default_threshold", "--kv-press-threshold")


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_truncated_weights(tmp_path: Path, keep: int) -> None:
    file = small(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refusal(lambda: load(tmp_path), "truncated or corrupt")


def test_garbled_header(tmp_path: Path) -> None:
    file = small(tmp_path) / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[8:40] = b"\xff" * 32
    file.write_bytes(raw)
    refusal(lambda: load(tmp_path), "truncated or corrupt")


def test_git_lfs_pointer_instead_of_weights(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5021496\n"
    (small(tmp_path) / "model.safetensors").write_text(text)
    refusal(lambda: load(tmp_path), "truncated or corrupt")


def test_missing_and_extra_tensors(tmp_path: Path) -> None:
    edit_tensors(small(tmp_path / "a"), lambda t: {k: v for k, v in t.items() if k != "layers.1.2.bias"})
    refusal(lambda: load(tmp_path / "a"), "missing layers.1.2.bias")
    edit_tensors(small(tmp_path / "b"), lambda t: {**t, "lm_head.weight": torch.zeros(2)})
    refusal(lambda: load(tmp_path / "b"), "unexpected lm_head.weight")


def test_config_of_the_other_kind_or_depth(tmp_path: Path) -> None:
    edit_config(small(tmp_path / "a"), hidden_dim=None)
    refusal(lambda: load(tmp_path / "a"), "linear surrogate of 3 layers", "layers.0.weight")
    edit_config(small(tmp_path / "b"), n_modules=LAYERS + 1)
    refusal(lambda: load(tmp_path / "b"), "4 layers", "layers.3.0.bias")


def test_wrong_shape(tmp_path: Path) -> None:
    edit_config(small(tmp_path), input_dim=HIDDEN + 1)
    refusal(lambda: load(tmp_path), f"shape [{MLP}, {HIDDEN}]", f"implies [{MLP}, {HIDDEN + 1}]")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_unsupported_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    name = "layers.0.0.weight"
    edit_tensors(small(tmp_path), lambda t: {**t, name: t[name].to(dtype)})
    refusal(lambda: load(tmp_path), name, "has dtype", "F32, BF16, F16")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_weight(tmp_path: Path, bad: float) -> None:
    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["layers.2.0.weight"][1, 2] = bad
        return tensors

    edit_tensors(small(tmp_path), spoil)
    refusal(lambda: load(tmp_path), "layers.2.0.weight holds NaN or infinity")


def test_weight_that_overflows_the_model_dtype(tmp_path: Path) -> None:
    edit_tensors(small(tmp_path), lambda t: {**t, "layers.0.0.bias": t["layers.0.0.bias"] + 1e6})
    load(tmp_path, torch.bfloat16)
    refusal(lambda: load(tmp_path, torch.float16), "layers.0.0.bias overflows", "--dtype bfloat16")


def test_check_fits_shows_both_sides() -> None:
    config = SurrogateConfig(4096, 8, 512, 36)
    check_fits(config, hidden_size=4096, num_layers=36, num_kv_heads=8, source="s")
    for change in ({"hidden_size": 5120}, {"num_layers": 64}, {"num_kv_heads": 4}):
        model = {"hidden_size": 4096, "num_layers": 36, "num_kv_heads": 8, **change}

        def call(sizes: dict[str, int] = model) -> None:
            check_fits(config, **sizes, source="some/id")

        ours = "hidden size {hidden_size}, {num_layers} layers, {num_kv_heads} KV heads".format(**model)
        refusal(call, "some/id", "hidden size 4096, 36 layers, 8 KV heads", f"the model has {ours}")


# The hub


def test_hub_id_downloads_only_the_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path, default_threshold=-2.5)
    asked: list[tuple[str, list[str]]] = []

    def download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(surrogate, "snapshot_download", download)
    assert read_config("owner/KVzap-x").default_threshold == -2.5
    assert load("owner/KVzap-x").config.n_modules == LAYERS
    both = ["config.json", "model.safetensors"]
    assert asked == [("owner/KVzap-x", ["config.json"]), ("owner/KVzap-x", both)]


def test_hub_repository_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small(tmp_path) / "model.safetensors").unlink()
    monkeypatch.setattr(surrogate, "snapshot_download", lambda *_, **__: str(tmp_path))
    refusal(lambda: load("owner/KVzap-x"), "hub repository", "has no model.safetensors")


@contextmanager
def hub_that_hangs_up() -> Iterator[str]:
    """Address of a hub that closes every connection without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            try:
                while True:
                    listener.accept()[0].close()
            except OSError:
                return  # the listener was shut down

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("offline", "error"), [("1", "LocalEntryNotFoundError"), ("0", "RemoteProtocolError|ReadError")]
)
def test_failed_download_without_sglang(tmp_path: Path, offline: str, error: str) -> None:
    """The real client in its offline mode and with a hub that hangs up (an error of its HTTP library, not its own).

    In a fresh process, because it reads the variables at import; there too: reading a surrogate must not pull in SGLang.
    """
    code = (
        "import sys, torch; from kvzap_sglang.presses.surrogate import *\n"
        "try: load_surrogate('owner/KVzap-none', dtype=torch.float32, device='cpu')\n"
        "except SurrogateError as error: print(error)\n"
        "print('sglang' in sys.modules)"
    )
    env = {"HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": ""}
    with hub_that_hangs_up() as address:
        env["HF_ENDPOINT"] = address
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[1] == "False" and lines[0].startswith("--kv-press-model owner/KVzap-none: ")
    assert "download of that hub id failed" in lines[0] and "local folder" in lines[0]
    assert re.search(rf"failed \(({error}): ", lines[0])
