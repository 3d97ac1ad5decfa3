"""A writer that is killed leaves what it committed, all of it, and nothing else."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stagetap
from stagetap.errors import Refused
from stagetap.stores.file_verify import verify_store
from store_samples import RUN, Engine, states

# Commits two samples, then stands in the middle of writing the third one.
MID_WRITE = """
engine = Engine(root)
engine.export("a"); engine.export("b")
what, ref = engine.tapped, engine.ref("c")
engine.publisher.submit(job(what, ref, 0, 7))
drain(engine.publisher, 1)
each = job(what, ref, 1, 5000)
def gather(start, end, out):
    each.gather(start, end, out)
    if start > 0:
        print("in the middle", flush=True)
        threading.Event().wait()
engine.publisher.submit(dataclasses.replace(each, gather=gather))
threading.Event().wait()
"""

# Commits as fast as it can, and says which samples are committed.
BUSY = """
engine = Engine(root)
for number in range(100_000):
    engine.export(f"{name}-{number}", tokens=200)
    print(f"{name}-{number}", flush=True)
"""


def start(code: str, root: Path, name: str = "") -> "subprocess.Popen[str]":
    path = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    header = (
        f"import sys; sys.path[:0] = {path!r}\n"
        "import dataclasses, threading\nfrom pathlib import Path\n"
        "from store_samples import Engine, drain, job\n"
        f"root, name = Path({str(root)!r}), {name!r}\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", header + code], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def kill() -> Callable[["subprocess.Popen[str]"], str]:
    """Kill -9 and give back what was printed since."""

    def kill_it(process: "subprocess.Popen[str]") -> str:
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        # Not communicate(): it would pass over the lines that readline() has read ahead.
        rest = process.stdout.read()
        process.wait(timeout=30)
        assert process.returncode == -signal.SIGKILL
        return rest

    return kill_it


def test_killed_in_the_middle_of_a_write(
    root: Path, kill: Callable[["subprocess.Popen[str]"], str]
) -> None:
    process = start(MID_WRITE, root)
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n"
    with pytest.raises(Refused, match="in use"):
        verify_store(root, gc=True)
    kill(process)
    dataset = stagetap.open_dataset(root, verify=True)
    assert [sample.sample_id for sample in dataset] == ["a", "b"]
    leftovers = list(root.rglob(f"{RUN}/c/*/*"))
    assert len(leftovers) == 2
    assert sum(path.name.startswith(".stagetap.") for path in leftovers) == 1
    # The same id again, at once, on the same store.
    engine = Engine(root)
    assert not engine.committer.is_committed(RUN, "c")
    engine.export("c", seed=3)
    assert dataset.refresh() == 1
    assert torch.equal(dataset["c"].layer(4), states(4, 7, 3).bfloat16())
    engine.close()
    report = verify_store(root, gc=True)
    assert report.ok
    assert report.samples == 3
    assert report.swept_bytes is not None
    assert report.swept_bytes > 0
    assert [path.name for path in root.rglob(".stagetap.*")] == []
    assert stagetap.open_dataset(root, verify=True)["c"].manifest.token_count == 7


def test_killed_at_any_moment_what_was_acknowledged_is_there(
    root: Path, kill: Callable[["subprocess.Popen[str]"], str]
) -> None:
    acknowledged: list[str] = []
    for round_, pause in enumerate((0.02, 0.11)):
        process = start(BUSY, root, f"r{round_}")
        assert process.stdout is not None
        acknowledged.append(process.stdout.readline().strip())
        time.sleep(pause)
        rest = kill(process)
        # A line of output that was cut is a commit that nobody was told of.
        acknowledged += rest.split("\n")[:-1]
    dataset = stagetap.open_dataset(root, verify=True)
    assert set(acknowledged) <= set(dataset.sample_ids)
    assert len(dataset) <= len(acknowledged) + 2
    assert all(sample.hidden_states.shape == (200, 3, 16) for sample in dataset)
    report = verify_store(root, gc=True)
    assert report.ok
    assert report.samples == len(dataset)
