"""``stagetap inspect`` and ``stagetap verify`` on stores written through the production path."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagetap.manifest import Manifest
from store_samples import Engine, tapped
from unit.cli.commands import Command


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two samples of two stages, one sample of one stage in another run."""
    root = tmp_path / "dataset"
    engine = Engine(root)
    engine.export("a/b [x]", 7)
    engine.export("second", 33, seed=1)
    engine.close()
    other = Engine(root, tapped(pp_layers=[(0, 6)]), run="run-2")
    other.export("second", 5, seed=2)
    other.close()
    return root


def first_manifest(dataset: Path) -> Manifest:
    from stagetap import open_dataset

    return open_dataset(dataset).manifest("a/b [x]")


def test_inspect_adds_up(stagetap: Command, dataset: Path) -> None:
    found = stagetap("inspect", dataset, "--json").json
    row_bytes = 16 * 2
    assert (found["samples"], found["tokens"]) == (3, 45)
    assert found["bytes"] == 45 * 4 * row_bytes
    assert found["layer_ids"] == [2, 0, 4, 6]
    runs = {run["run_id"]: run for run in found["runs"]}
    assert runs["run-1"]["layouts"] == ["PP=2 TP=1"]
    assert runs["run-1"]["tokens"] == 40
    assert runs["run-2"]["samples"] == 1
    assert [each["run_id"] for each in found["recent"]] == ["run-2", "run-1", "run-1"]
    stages = {(stage["run_id"], stage["stage"]): stage for stage in found["stages"]}
    assert stages["run-1", 0]["layers"] == [0, 2]
    assert stages["run-1", 1]["bytes"] == 40 * 2 * row_bytes
    assert stages["run-2", 0]["fragments"] == 1


def test_inspect_one_run(stagetap: Command, dataset: Path) -> None:
    found = stagetap("inspect", dataset, "--run", "run-2", "--json").json
    assert (found["samples"], [run["run_id"] for run in found["runs"]]) == (1, ["run-2"])


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_store_without_samples_is_said_to_be_one(
    stagetap: Command, tmp_path: Path, command: str
) -> None:
    Engine(tmp_path / "empty").close()
    done = stagetap(command, tmp_path / "empty")
    assert done.code == 0
    assert "no samples: none has been committed yet" in done.stdout
    assert "┃" not in done.stdout


def test_inspect_prints_tables(stagetap: Command, dataset: Path) -> None:
    done = stagetap("inspect", dataset)
    assert done.code == 0
    for text in ("tiny", "2, 0, 4, 6", "run-1", "PP=2 TP=1", "residual, bfloat16 [16]"):
        assert text in done.stdout


def test_inspect_a_sample(stagetap: Command, dataset: Path) -> None:
    made = first_manifest(dataset)
    found = stagetap("inspect", dataset, "a/b [x]", "--json").json
    assert found["metadata"] == {"seed": 0}
    assert [each["path"] for each in found["fragments"]] == [f.path for f in made.fragments]
    shown = stagetap("inspect", dataset, "a/b [x]")
    assert "a/b [x]" in shown.stdout
    for fragment in made.fragments:
        assert fragment.checksum in shown.stdout
    assert "4 aux, 6 last" in shown.stdout
    assert "7×2×16" in shown.stdout


def test_inspect_a_sample_of_two_runs(stagetap: Command, dataset: Path) -> None:
    done = stagetap("inspect", dataset, "second")
    assert done.code == 1
    assert "in several runs (run-1, run-2); name one with --run" in done.stderr
    assert stagetap("inspect", dataset, "second", "--run", "run-2", "--json").json["attempt"]


def test_inspect_what_is_not_there(stagetap: Command, dataset: Path, tmp_path: Path) -> None:
    done = stagetap("inspect", dataset, "third")
    assert (done.code, done.stdout) == (1, "")
    assert "holds no sample 'third'" in done.stderr
    done = stagetap("inspect", tmp_path / "nowhere")
    assert done.code == 1
    assert "is no StageTap store" in done.stderr
    assert stagetap("inspect", "s3://bucket").code == 2


def test_inspect_without_deleted_samples(stagetap: Command, dataset: Path) -> None:
    from stagetap import open_dataset

    open_dataset(dataset).delete("a/b [x]")
    assert stagetap("inspect", dataset, "--json").json["samples"] == 2
    assert stagetap("inspect", dataset, "a/b [x]").code == 1


def test_verify_a_whole_dataset(stagetap: Command, dataset: Path) -> None:
    done = stagetap("verify", dataset)
    assert done.code == 0
    assert "3 samples whole, 5.6 KiB (every byte compared), 0 not" in done.stdout
    assert stagetap("verify", dataset, "--json").json["ok"] is True


def test_verify_names_what_is_wrong(stagetap: Command, dataset: Path) -> None:
    made = first_manifest(dataset)
    file = dataset / made.fragments[1].path
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = stagetap("verify", dataset, "--json")
    assert done.code == 1
    (problem,) = done.json["problems"]
    assert problem["sample_id"] == "a/b [x]"
    assert problem["stage"] == 1
    assert problem["kind"] == "ChecksumMismatch"
    shown = stagetap("verify", dataset)
    assert "a/b [x]" in shown.stdout
    assert "ChecksumMismatch" in shown.stdout
    assert "2 samples whole" in shown.stdout


def test_verify_without_checksums_looks_at_sizes(stagetap: Command, dataset: Path) -> None:
    made = first_manifest(dataset)
    file = dataset / made.fragments[0].path
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert stagetap("verify", dataset, "--no-checksums").code == 0
    file.write_bytes(content[:-1])
    done = stagetap("verify", dataset, "--no-checksums", "--json")
    assert done.json["problems"][0]["kind"] == "TruncatedFragment"


def test_verify_sweeps_what_no_commit_names(stagetap: Command, dataset: Path) -> None:
    engine = Engine(dataset, run="run-3")
    left = engine.publish(engine.ref("never committed"), 7)
    during = stagetap("verify", dataset, "--gc")
    assert during.code == 2
    assert "in use by" in during.stderr
    assert "they may be its own" in stagetap("verify", dataset).stdout
    engine.close()
    assert "remove them with --gc" in stagetap("verify", dataset).stdout
    done = stagetap("verify", dataset, "--gc", "--json")
    assert done.code == 0
    assert done.json["swept_bytes"] == sum(f.file_bytes or 0 for f in left.fragments)
    assert not (dataset / left.fragments[0].path).exists()
    assert stagetap("verify", dataset, "--json").json["orphans"] == []


def test_verify_reports_a_second_commit(stagetap: Command, dataset: Path) -> None:
    # What two engines leave that raced: one sample in the logs of both.
    log = next(path for path in (dataset / "commits").iterdir() if b"run-2" in path.read_bytes())
    log.with_name(f"later-{log.name}").write_bytes(log.read_bytes())
    done = stagetap("verify", dataset)
    assert "committed twice: sample 'second' of run 'run-2'" in done.stdout
    assert "3 samples whole" in done.stdout
    assert done.code == 0
