"""The start-up hook of kvzap-sglang-cpu: its defaults, when it stays away, and the torchvision shim."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

bootstrap = pytest.importorskip("kvzap_sglang_cpu.bootstrap", reason="kvzap-sglang-cpu is installed on CPUs only")
shim = pytest.importorskip("kvzap_sglang_cpu.torchvision_shim")


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter of this environment with none of the bootstrap's variables but `environ`."""
    clean = {name: value for name, value in os.environ.items() if name not in bootstrap.ENVIRONMENT}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environ}, capture_output=True, text=True, check=False
    )


def environment_of(**environ: str) -> dict[str, str | None]:
    names = list(bootstrap.ENVIRONMENT)
    done = run_python(f"import json, os; print(json.dumps({{n: os.environ.get(n) for n in {names}}}))", **environ)
    return dict(json.loads(done.stdout))


def test_pth_file_is_in_the_root_of_site_packages() -> None:
    pth = Path(sysconfig.get_paths()["purelib"]) / "kvzap_sglang_cpu.pth"
    assert pth.read_text().strip() == "import kvzap_sglang_cpu.bootstrap"


def test_every_start_of_python_gets_the_defaults() -> None:
    assert environment_of() == {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def test_what_the_user_sets_is_respected() -> None:
    asked = {"SGLANG_USE_CPU_ENGINE": "0", "OMP_WAIT_POLICY": "ACTIVE"}
    assert environment_of(**asked) == {**asked, "GOMP_SPINCOUNT": "0"}


def test_it_is_cheap() -> None:
    heavy = ["torch", "numpy", "importlib.metadata"]
    done = run_python(f"import sys; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("driver", "kernels", "active"),
    [(True, True, False), (True, False, True), (False, True, True), (False, False, True)],
)
def test_it_stays_away_from_a_gpu_machine(
    monkeypatch: pytest.MonkeyPatch, driver: bool, kernels: bool, active: bool
) -> None:
    monkeypatch.setattr(bootstrap, "has_nvidia_driver", lambda: driver)
    monkeypatch.setattr(bootstrap, "has_real_sgl_kernel", lambda: kernels)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, shim.TorchvisionShim)])
    environ: dict[str, str] = {}
    assert bootstrap.bootstrap(environ) is active
    assert environ == (bootstrap.ENVIRONMENT if active else {})
    assert any(isinstance(finder, shim.TorchvisionShim) for finder in sys.meta_path) is active


def test_a_second_call_adds_no_second_finder() -> None:
    before = list(sys.meta_path)
    assert bootstrap.bootstrap({})
    assert sys.meta_path == before


@pytest.mark.parametrize("name", ["sglang-kernel", "sgl-kernel"])
def test_a_real_kernel_distribution_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert not bootstrap.has_real_sgl_kernel()
    info = tmp_path / f"{name.replace('-', '_')}-0.4.10.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.4.10\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert bootstrap.has_real_sgl_kernel()


def test_a_driver_file_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "version"
    monkeypatch.setattr(bootstrap, "NVIDIA_DRIVER_FILES", (str(version),))
    assert not bootstrap.has_nvidia_driver()
    version.write_text("NVRM version: 580\n")
    assert bootstrap.has_nvidia_driver()


def test_torchvision_imports_and_its_operators_are_declared_once() -> None:
    done = run_python(
        "import torchvision, torch, inspect\n"
        "from kvzap_sglang_cpu.torchvision_shim import declare_operators\n"
        "torch.ops.torchvision.nms, torch.ops.torchvision.qnms\n"
        "assert not declare_operators()\n"
        "assert inspect.getsource(torchvision)\n"
        "print(torchvision.__version__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0.28.0")


def test_the_shim_is_what_makes_torchvision_importable() -> None:
    torch = pytest.importorskip("torch")
    from importlib.metadata import version

    if torch.version.cuda is not None or version("torchvision").endswith("+cpu"):
        pytest.skip("torch and torchvision are of the same kind here: the shim has nothing to do")
    done = run_python(
        "import sys\n"
        "from kvzap_sglang_cpu.torchvision_shim import TorchvisionShim\n"
        "sys.meta_path = [f for f in sys.meta_path if not isinstance(f, TorchvisionShim)]\n"
        "import torchvision"
    )
    assert done.returncode != 0
    assert "operator torchvision::nms does not exist" in done.stderr
