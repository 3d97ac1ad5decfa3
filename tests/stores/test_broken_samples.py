"""Whatever happens to a stored sample, reading it says what, of which sample, stage and layer."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

import stagetap
from stagetap.errors import (
    ChecksumMismatch,
    ForeignFile,
    MissingFragment,
    SampleError,
    StreamMismatch,
    TokenMismatch,
    TruncatedFragment,
)
from stagetap.manifest import Manifest, token_digest
from stagetap.stores.file_log import decode_line, encode_line
from store_samples import RUN, Engine, tapped

READER = ("HiddenStatesDataset", "OnlineStream", "Sample", "consume", "open_dataset")


@pytest.fixture
def made(root: Path) -> Manifest:
    """Sample s, stored by stages 0 (layers 0, 2) and 1 (layers 4, 6), beside samples r and t."""
    engine = Engine(root)
    engine.export("r", tokens=6, seed=1)
    made = engine.export("s", tokens=6, seed=2)
    engine.export("t", tokens=6, seed=3)
    engine.close()
    return made


def read_fails(root: Path, error: type[SampleError], stage: int | None, layer: int | None) -> str:
    """Reading s must fail in this way, with `verify` or without; the others are as they were."""
    for verify in (True, error is ChecksumMismatch):
        dataset = stagetap.open_dataset(root, verify=verify)
        with pytest.raises(error) as caught:
            dataset["s"]
        assert type(caught.value) is error
        assert caught.value.sample_id == "s"
        assert (caught.value.stage, caught.value.layer) == (stage, layer)
        assert "sample 's'" in str(caught.value)
        assert [dataset[key].sample_id for key in ("r", "t")] == ["r", "t"]
    if stage is not None:
        assert f"stage {stage} (layers {'0, 2' if stage == 0 else '4, 6'})" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("stage", "layer"), [(0, 0), (1, 4)])
def test_a_fragment_removed_by_hand(root: Path, made: Manifest, stage: int, layer: int) -> None:
    path = root / made.fragments[stage].path
    path.unlink()
    assert str(path) in read_fails(root, MissingFragment, stage, layer)


def test_an_attempt_removed_by_hand(root: Path, made: Manifest) -> None:
    shutil.rmtree((root / made.fragments[0].path).parent)
    read_fails(root, MissingFragment, 0, 0)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file(root: Path, made: Manifest, kept: int) -> None:
    path = root / made.fragments[1].path
    os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
    assert "bytes of" in read_fails(root, TruncatedFragment, 1, 4)


def test_a_file_that_grew(root: Path, made: Manifest) -> None:
    with (root / made.fragments[1].path).open("ab") as file:
        file.write(b"x")
    read_fails(root, ForeignFile, 1, 4)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [-1, -6 * 2 * 16 * 2, -100])
def test_a_flipped_byte_is_seen_when_asked_for(root: Path, made: Manifest, at: int) -> None:
    flip(root / made.fragments[1].path, at)
    message = read_fails(root, ChecksumMismatch, 1, 4)
    assert made.fragments[1].checksum in message
    unverified = stagetap.open_dataset(root)["s"]
    with pytest.raises(ChecksumMismatch):
        unverified.verify()


def test_flipped_token_ids_are_always_seen(root: Path, made: Manifest) -> None:
    path = root / made.fragments[0].path
    flip(path, path.stat().st_size - made.fragments[0].byte_size - 8)
    assert made.token_digest in read_fails(root, TokenMismatch, 0, 0)


def test_a_flipped_byte_of_the_header(root: Path, made: Manifest) -> None:
    for at in (0, 7, 8, 30, 100):
        whole = (root / made.fragments[1].path).read_bytes()
        flip(root / made.fragments[1].path, at)
        read_fails(root, ForeignFile, 1, 4)
        (root / made.fragments[1].path).write_bytes(whole)
    assert stagetap.open_dataset(root, verify=True)["s"].sample_id == "s"


def test_a_file_whose_tensors_lie_elsewhere_than_its_header_says(
    root: Path, made: Manifest
) -> None:
    path = root / made.fragments[1].path
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip()
    assert len(text) < length
    moved = len(text).to_bytes(8, "little") + text + data[8 + length :]
    path.write_bytes(moved + b" " * (len(data) - len(moved)))
    assert "do not fill it" in read_fails(root, ForeignFile, 1, 4)


def put_other_sample(root: Path, made: Manifest, path: Path) -> None:
    other = stagetap.open_dataset(root)["t"].manifest.fragments[1]
    shutil.copy(root / other.path, path)


def put_other_stage(root: Path, made: Manifest, path: Path) -> None:
    shutil.copy(root / made.fragments[0].path, path)


def put_plain_safetensors(root: Path, made: Manifest, path: Path) -> None:
    tensor = torch.zeros(6, 2, 16, dtype=torch.bfloat16)
    save_file({"hidden_states": tensor}, path)
    pad(path, made.fragments[1].file_bytes)


def put_text(root: Path, made: Manifest, path: Path) -> None:
    path.write_bytes(b"x" * (made.fragments[1].file_bytes or 0))


def put_zeros(root: Path, made: Manifest, path: Path) -> None:
    path.write_bytes(bytes(made.fragments[1].file_bytes or 0))


def put_directory(root: Path, made: Manifest, path: Path) -> None:
    path.unlink()
    path.mkdir()


def pad(path: Path, size_bytes: int | None) -> None:
    assert size_bytes is not None
    os.truncate(path, size_bytes)


@pytest.mark.parametrize(
    "put",
    [put_other_sample, put_plain_safetensors, put_text, put_zeros],
    ids=lambda put: put.__name__,
)
def test_a_foreign_file_in_place_of_a_fragment(root: Path, made: Manifest, put: Any) -> None:
    put(root, made, root / made.fragments[1].path)
    read_fails(root, ForeignFile, 1, 4)


@pytest.mark.parametrize("put", [put_other_stage, put_directory], ids=lambda put: put.__name__)
def test_something_of_another_size_in_place_of_a_fragment(
    root: Path, made: Manifest, put: Any
) -> None:
    put(root, made, root / made.fragments[1].path)
    with pytest.raises((ForeignFile, TruncatedFragment)) as caught:
        stagetap.open_dataset(root)["s"]
    assert caught.value.stage == 1


def test_two_fragments_of_one_sample_swapped(root: Path, made: Manifest) -> None:
    first, second = (root / fragment.path for fragment in made.fragments)
    first.rename(first.with_name("x"))
    second.rename(first)
    first.with_name("x").rename(second)
    with pytest.raises((ForeignFile, TruncatedFragment), match="sample 's'"):
        stagetap.open_dataset(root)["s"]


def rewrite_log(root: Path, old: bytes, new: bytes) -> None:
    (log,) = (root / "commits").iterdir()
    lines = []
    for line in log.read_bytes().splitlines():
        body = decode_line(line)
        assert body is not None
        lines.append(encode_line(body.replace(old, new)))
    log.write_bytes(b"".join(lines))


def test_a_manifest_with_other_tokens(root: Path, made: Manifest) -> None:
    other = token_digest(np.arange(6))
    rewrite_log(root, made.token_digest.encode(), other.encode())
    assert other in read_fails(root, TokenMismatch, 0, 0)


def test_a_commit_log_of_another_store(root: Path, made: Manifest, tmp_path: Path) -> None:
    for changes, error in (
        ({"stream": "prefix_sum"}, StreamMismatch),
        ({"weights_fingerprint": "sha256:other"}, ForeignFile),
    ):
        other = tmp_path / error.__name__
        engine = Engine(other, tapped(**changes))
        engine.export("foreign")
        engine.close()
        shutil.copytree(other / "commits", root / "commits", dirs_exist_ok=True)
        shutil.copytree(other / RUN, root / RUN, dirs_exist_ok=True)
        with pytest.raises(error, match="brought here from another store"):
            stagetap.open_dataset(root)["foreign"]
        shutil.rmtree(root / RUN / "foreign")
        for log in (other / "commits").iterdir():
            (root / "commits" / log.name).unlink()


def test_the_wrong_stream_kind(root: Path, made: Manifest) -> None:
    assert len(stagetap.open_dataset(root, stream="residual")) == 3
    with pytest.raises(StreamMismatch, match="'residual', asked for was 'attn_res_mixture'"):
        stagetap.open_dataset(root, stream="attn_res_mixture")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_exception_reaches_a_trainer_through_a_data_loader(
    root: Path, made: Manifest, num_workers: int
) -> None:
    (root / made.fragments[1].path).unlink()
    stream = stagetap.open_dataset(root).stream()
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
    with pytest.raises(MissingFragment, match="sample 's' of run 'run-1', stage 1"):
        list(loader)


@pytest.mark.parametrize("name", [n for n in stagetap.__all__ if n not in READER])
def test_every_exception_passes_between_processes(name: str) -> None:
    kind = getattr(stagetap, name)
    assert issubclass(kind, stagetap.StageTapError)
    try:
        raise kind("stage 1 of sample 's' is broken")
    except stagetap.StageTapError as error:
        again = pickle.loads(pickle.dumps(error))
        wrapped = ExceptionWrapper(where="in a worker")
    assert str(again) == "stage 1 of sample 's' is broken"
    assert again.__dict__ == error_fields(kind)
    with pytest.raises(kind, match="stage 1 of sample 's' is broken"):
        wrapped.reraise()


def error_fields(kind: type[stagetap.StageTapError]) -> dict[str, Any]:
    return dict(kind("").__dict__)


def test_an_exception_keeps_its_fields_when_pickled() -> None:
    error = MissingFragment("gone", sample_id="s", stage=1, layer=4)
    again = pickle.loads(pickle.dumps(error))
    assert (again.sample_id, again.stage, again.layer) == ("s", 1, 4)
