"""What whoever starts the process can do wrong: exit status 2, one clear line, no stack trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gapless.executor.config import UserError, default_threads, default_token_max, parse
from gapless.executor.loading import load
from gapless.executor.phases import Phases
from tests.models import tiny_model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("tiny"), context_length=64)


def changed_model(model: Path, folder: Path, **fields: object) -> Path:
    """A copy of `model` whose config has other `fields`."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def test_a_user_error_is_one_line_and_status_2(tmp_path: Path) -> None:
    flags = ["--run-folder", str(tmp_path), "--model", str(tmp_path / "nowhere")]
    done = subprocess.run(
        [sys.executable, "-m", "gapless.executor", *flags],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"ERROR no such model folder: {tmp_path / 'nowhere'}")


def test_what_the_flags_name_must_be_there(model: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    run, folder = str(tmp_path), str(model)
    for flags, complaint in [
        (["--run-folder", run, "--model", str(deep)], "missing: config.json, tokenizer.json"),
        (["--run-folder", str(tmp_path / "no"), "--model", folder], "no such run folder"),
        (["--run-folder", str(deep), "--model", folder], "choose a shorter run folder"),
        (["--run-folder", run, "--model", folder, "--ready-fd", "999"], "Bad file descriptor"),
        (
            ["--run-folder", run, "--model", folder, "--row-max", "8", "--token-max", "4"],
            "--token-max 4 is less than --row-max 8",
        ),
    ]:
        with pytest.raises(UserError) as raised:
            parse(flags)
        assert complaint in str(raised.value)


@pytest.mark.parametrize(
    "flags", [["--kv-blocks", "1"], ["--row-max", "none"], ["--device", "abacus"], []]
)
def test_malformed_flags_are_status_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(["--run-folder", "/", *flags])
    assert raised.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_model_that_cannot_be_served_is_refused(model: Path, tmp_path: Path) -> None:
    flags = ["--run-folder", str(tmp_path), "--threads", "1", "--model"]
    linear = {"layer_types": ["linear_attention", "full_attention"]}
    broken = changed_model(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\0" * 64)
    for folder, complaint in [
        (changed_model(model, tmp_path / "unknown", model_type="abacus"), "cannot load"),
        (changed_model(model, tmp_path / "linear", **linear), "linear_attention"),
        (changed_model(model, tmp_path / "larger", intermediate_size=48), "cannot load"),
        (broken, "cannot load"),
    ]:
        with pytest.raises(UserError) as raised:
            load(parse([*flags, str(folder)]), Phases())
        assert complaint in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    """Else the missing weights would be random."""
    folder = tiny_model_folder(tmp_path / "tiny", dtype="float32")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = parse(["--run-folder", str(tmp_path), "--model", str(folder)])
    with pytest.raises(UserError, match=r"lacks 1 .*down_proj"):
        load(config, Phases())


def test_a_pool_that_does_not_fit_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--run-folder", str(tmp_path), "--model", str(model), "--threads", "1"]
    with pytest.raises(UserError, match=r"--kv-blocks 1000000000 takes .* choose fewer blocks"):
        load(parse([*flags, "--kv-blocks", "1000000000"]), Phases())
    monkeypatch.setattr("gapless.executor.loading.available_memory_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"choose a shorter context \(--context-length-max\)"):
        load(parse(flags), Phases())


def test_facts_follow_the_flags(model: Path, tmp_path: Path) -> None:
    flags = ["--run-folder", str(tmp_path), "--model", str(model), "--threads", "1"]
    facts = load(parse([*flags, "--row-max", "3", "--token-max", "9"]), Phases()).facts
    assert (facts.row_max, facts.token_max, facts.context_length) == (3, 9, 64)
    assert facts.block_count == 1 + 3 * (64 // 16), "three whole contexts and scratch"
    capped = load(parse([*flags, "--context-length-max", "40"]), Phases()).facts
    assert (capped.context_length, capped.token_max) == (40, 512)
    assert load(parse([*flags, "--context-length-max", "400"]), Phases()).facts.context_length == 64


def test_a_step_has_more_tokens_on_a_gpu_and_never_fewer_than_rows() -> None:
    assert [default_token_max(device, 64) for device in ("cpu", "cuda")] == [512, 2048]
    assert default_token_max("cpu", 600) == 600


def test_threads_leave_one_core_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1, 4})
    assert default_threads() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    assert default_threads() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0})
    assert default_threads() == 1
