"""The identity of a model folder: it changes with what matters and with nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from gapless.protos import model_folder


def make_folder(folder: Path, *, vocab_size: int = 8, weight: bytes = b"wwww") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    (folder / "tokenizer.json").write_text("{}")
    span = {"w": {"dtype": "U8", "shape": [len(weight)], "data_offsets": [0, len(weight)]}}
    header = json.dumps(span).encode()
    content = len(header).to_bytes(8, "little") + header + weight
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_a_whole_folder_misses_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    assert model_folder.missing_files(folder) == ()
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    assert model_folder.missing_files(folder) == ("config.json", "*.safetensors")


def test_equal_folders_are_the_same_revision_wherever_they_stand(tmp_path: Path) -> None:
    first, second = make_folder(tmp_path / "a"), make_folder(tmp_path / "b")
    (second / "README.md").write_text("notes")
    assert model_folder.revision(first) == model_folder.revision(second)


def test_another_config_or_another_shape_is_another_revision(tmp_path: Path) -> None:
    revisions = {
        model_folder.revision(make_folder(tmp_path / "a")),
        model_folder.revision(make_folder(tmp_path / "b", vocab_size=9)),
        model_folder.revision(make_folder(tmp_path / "c", weight=b"wwwww")),
    }
    assert len(revisions) == 3


def test_a_folder_without_weights_records_its_revision(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a")
    expected = model_folder.revision(folder)
    (folder / "model.safetensors").unlink()
    (folder / "revision").write_text(f"{expected}\n")
    assert model_folder.revision(folder) == expected
