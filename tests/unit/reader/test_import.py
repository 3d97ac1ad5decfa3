"""A trainer imports the reader without vLLM, and the package without torch."""

import subprocess
import sys
import textwrap
from pathlib import Path

from store_samples import Engine


def run(code: str, *arguments: str) -> str:
    path = [str(Path(__file__).parents[3] / "plugin"), *filter(None, sys.path)]
    header = f"import sys\nsys.path[:0] = {path!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", header + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCK = """
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Block())
"""


def test_reading_and_writing_need_no_vllm(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store")
    engine.export("s", tokens=4)
    engine.close()
    printed = run(
        'BLOCKED = {"vllm", "transformers"}'
        + BLOCK
        + """
import stagetap
from stagetap import Sample, HiddenStatesDataset, MissingFragment
import stagetap.publish.publisher, stagetap.stores.file_verify
dataset = stagetap.open_dataset(sys.argv[1])
sample = dataset["s"]
assert isinstance(sample, Sample) and isinstance(dataset, HiddenStatesDataset)
print(tuple(sample.hidden_states.shape))
assert "vllm" not in sys.modules
""",
        str(tmp_path / "store"),
    )
    assert printed.strip() == "(4, 3, 16)"


def test_the_package_and_the_pure_rules_need_no_torch() -> None:
    run(
        'BLOCKED = {"vllm", "torch", "transformers"}'
        + BLOCK
        + """
import stagetap, stagetap.errors, stagetap.keys, stagetap.manifest, stagetap.stores.base
import stagetap.stores.file_committer, stagetap.stores.file_reader, stagetap.stores.file_verify
import stagetap.stores.file_writer, stagetap.reader.order
assert "torch" not in sys.modules
assert stagetap.__version__
try:
    stagetap.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise SystemExit("no AttributeError")
assert set(stagetap.__all__) >= {"open_dataset", "Sample", "HiddenStatesDataset"}
"""
    )
