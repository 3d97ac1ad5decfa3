"""Which directories the file store takes, and who may write to one."""

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import stagetap
from stagetap.errors import (
    ForeignStore,
    Refused,
    StoreError,
    UnknownVersion,
)
from stagetap.stores.base import (
    KnownKind,
    check_store,
    open_store_committer,
    open_store_reader,
    open_store_writer,
)
from stagetap.stores.file_committer import FileStoreCommitter
from stagetap.stores.file_verify import verify_store
from stagetap.stores.file_writer import FileStoreWriter
from stagetap.stores.kind import kind_of
from store_samples import RUN, Engine, files, tapped, visible


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float32"}, "dtype bfloat16, .* would write float32"),
        ({"weights_fingerprint": "sha256:other"}, "weights_fingerprint sha256:abab.* sha256:other"),
        ({"layer_ids": (0, 2, 4, 6)}, r"layer_ids \[2, 0, 4, 6\], .* \[0, 2, 4, 6\]"),
        ({"stream": "attn_res_mixture"}, "stream residual, .* attn_res_mixture"),
        ({"hidden_size": 32}, "hidden_size 16, .* 32"),
        ({"engine_args": {"kv_cache_dtype": "fp8"}}, r"engine_args .*kv_cache_dtype"),
    ],
)
def test_another_kind_of_data_in_one_store_is_refused(
    root: Path, changes: dict[str, Any], named: str
) -> None:
    Engine(root).close()
    with pytest.raises(Refused, match=named + ".*another directory"):
        Engine(root, tapped(**changes))
    assert visible(root) == []


def test_another_layout_of_the_same_model_shares_the_store(root: Path) -> None:
    for number, layout in enumerate([((0, 6),), ((0, 3), (3, 6)), ((0, 1), (1, 1), (1, 6))]):
        engine = Engine(root, tapped(pp_layers=layout), run=f"run-{number}")
        engine.export(f"s{number}", tokens=4)
        engine.close()
    dataset = stagetap.open_dataset(root, verify=True)
    assert dataset.sample_ids == ["s0", "s1", "s2"]
    assert all(torch.equal(s.hidden_states, dataset[0].hidden_states) for s in dataset)


def test_of_two_engines_that_claim_at_once_one_wins(root: Path) -> None:
    outcomes: list[str] = []
    together = threading.Barrier(8)

    def claim(dtype: str) -> None:
        committer = FileStoreCommitter(str(root))
        what = tapped(dtype=dtype)
        together.wait()
        try:
            committer.begin_run(kind_of(what))
            outcomes.append(dtype)
        except Refused:
            outcomes.append("refused")
        committer.close()

    dtypes = ["float16", "bfloat16"] * 4
    threads = [threading.Thread(target=claim, args=(dtype,)) for dtype in dtypes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes).count("refused") == 4
    assert len(set(outcomes)) == 2
    assert open_store_reader(root).invariant.dtype in outcomes


def test_a_directory_of_somebody_else_is_refused(root: Path) -> None:
    root.mkdir()
    (root / "thesis.tex").write_text("mine")
    with pytest.raises(Refused, match=r"holds other things \(thesis.tex\)"):
        Engine(root)
    assert files(root) == {"thesis.tex"}
    with pytest.raises(ForeignStore, match=r"no stagetap\.json"):
        stagetap.open_dataset(root)


def test_a_start_that_was_killed_before_its_claim_does_no_harm(root: Path) -> None:
    for name in ("commits", "deletes", "nonces", "lost+found"):
        (root / name).mkdir(parents=True)
    (root / ".stagetap.stagetap.json.123").write_text("half")
    Engine(root).close()


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"store_version":1,"dtype":3}', "\udcff"])
def test_a_claim_that_is_damaged_is_named(root: Path, text: str) -> None:
    Engine(root).close()
    (root / "stagetap.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ForeignStore, match=r"stagetap\.json was not written by StageTap"):
        stagetap.open_dataset(root)
    with pytest.raises(ForeignStore):
        Engine(root)


def test_a_store_of_another_version_is_named(root: Path) -> None:
    Engine(root).close()
    (root / "stagetap.json").write_text('{"store_version": 2, "something": "else"}')
    with pytest.raises(UnknownVersion, match="store_version is 2"):
        stagetap.open_dataset(root)


@pytest.mark.parametrize("uri", ["mooncake://host:1", "s3://bucket", "", "file://host/x"])
@pytest.mark.parametrize("open_store", [open_store_reader, open_store_writer, open_store_committer])
def test_addresses_that_lead_nowhere_are_refused(uri: str, open_store: Any) -> None:
    with pytest.raises(Refused):
        open_store(uri)


def test_an_address_may_be_a_path_or_a_file_uri(root: Path, engine: Engine) -> None:
    engine.export("s")
    for uri in (root, str(root), f"file://{root}", os.path.relpath(root)):
        assert stagetap.open_dataset(uri).sample_ids == ["s"]


def test_a_worker_reads_the_schedulers_nonce_in_a_shared_directory_only(
    tmp_path: Path, root: Path, engine: Engine
) -> None:
    elsewhere = FileStoreWriter(str(tmp_path / "elsewhere"))
    assert elsewhere.read_nonces() == []
    second = FileStoreCommitter(str(root))
    second.leave_nonce("another/nonce")
    assert sorted(engine.writer.read_nonces()) == ["another/nonce", f"nonce-{RUN}"]
    second.close()
    assert engine.writer.read_nonces() == [f"nonce-{RUN}"]


def test_a_nonce_of_an_engine_that_starts_is_not_swept(root: Path) -> None:
    Engine(root).close()
    starting = FileStoreCommitter(str(root))
    starting.leave_nonce("nonce")
    with pytest.raises(Refused, match="in use"):
        verify_store(root, gc=True)
    starting.close()
    verify_store(root, gc=True)


def test_a_store_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=f"{path}.*another directory"):
            FileStoreWriter(str(path))
        with pytest.raises(ForeignStore):
            stagetap.open_dataset(path)


def test_what_no_engine_could_use_is_told_before_one_starts(tmp_path: Path) -> None:
    kind = KnownKind(layer_ids=(1, 2))
    check_store(tmp_path / "new", kind)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    check_store(tmp_path / "empty", kind)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(Refused, match="is no directory"):
        check_store(file, kind)
    with pytest.raises(Refused, match="holds other things"):
        check_store(tmp_path, kind)
    engine = Engine(tmp_path / "store")
    what = engine.tapped
    engine.close()
    held = KnownKind(
        layer_ids=what.layer_ids, weights_fingerprint=what.weights_fingerprint, dtype=what.dtype
    )
    for same in (held, msgspec.structs.replace(held, weights_fingerprint=None, dtype=None)):
        check_store(tmp_path / "store", same)
    for other in (
        {"layer_ids": (*what.layer_ids, 0)},
        {"weights_fingerprint": "other"},
        {"dtype": "float64"},
    ):
        with pytest.raises(Refused, match=f"holds data with {next(iter(other))}"):
            check_store(tmp_path / "store", msgspec.structs.replace(held, **other))
