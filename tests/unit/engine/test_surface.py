"""What the plugin uses of vLLM exists in every pinned release, whose code need not run here."""

from __future__ import annotations

import pytest

from stagetap.patchstack.locate import find_vllm, patches_root, pinned_versions
from stagetap.patchstack.releases import Unreachable
from surface.__main__ import check_release, plugin_sources
from surface.check import Report, check
from surface.sources import Plugin

INSTALLED = find_vllm().version
OTHERS = [version for version in pinned_versions(patches_root()) if version != INSTALLED]


def _expect_nothing_missing(report: Report) -> None:
    assert report.findings == []
    # The check looks at the plugin, not past it.
    assert report.imports > 60
    assert report.overrides > 40
    assert report.attributes > 200
    assert report.keywords > 20


def test_nothing_is_missing_in_the_installed_release() -> None:
    _expect_nothing_missing(check_release(INSTALLED))


@pytest.mark.full
@pytest.mark.parametrize("version", OTHERS)
def test_nothing_is_missing_in_the_other_pins(version: str) -> None:
    try:
        report = check_release(version)
    except Unreachable as error:
        pytest.skip(str(error))
    _expect_nothing_missing(report)


def test_no_module_but_one_knows_of_several_releases() -> None:
    """A version is written down (manifests), never compared; an import has no second try."""
    for path, data in plugin_sources().items():
        text = data.decode()
        if path.startswith("stagetap/engine/"):
            assert "packaging" not in text, path
            assert ("__version__" in text) == path.endswith("engine/agreement.py"), path
            assert ("except ImportError" in text) == path.endswith("engine/compat.py"), path


VLLM = """
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from vllm.config import Config

class Output(ABC):
    @abstractmethod
    def get(self): ...
    @abstractmethod
    def save(self): ...

class Base:
    config: "Config | None"
    def __init__(self, config: "Config"):
        self.kept = config
    def step(self, request, *, dry=False): ...
    def group(self) -> "Config": ...

class Worker(Base):
    def load(self): ...
"""
CONFIG = """
class Config:
    size: int
    @property
    def parent(self) -> "Config": ...
"""


def _findings(own: str) -> list[str]:
    vllm = {
        "vllm/__init__.py": b'MODULE_ATTRS = {"Lazy": ".base:Base"}\n',
        "vllm/base.py": VLLM.encode(),
        "vllm/config.py": CONFIG.encode(),
    }
    return check(Plugin({"stagetap/own.py": own.encode()}, vllm)).findings


def test_all_is_well() -> None:
    own = """
from vllm import Lazy
from vllm.base import Base, Output, Worker

class Mixin:
    def load(self):
        super().load()

class Mine(Mixin, Worker):
    def step(self, request, *, dry=False):
        return self.kept.size + self.group().parent.size

class Done(Output):
    def get(self): ...
    def save(self): ...

def use(base: Base, lazy: Lazy):
    config = base.group()
    return config.size, base.config.parent.size, lazy.kept, Worker(config=config)
"""
    assert _findings(own) == []


@pytest.mark.parametrize(
    ("own", "finding"),
    [
        ("from vllm.base import Gone\n", "vllm.base has no Gone"),
        ("from vllm.gone import Base\n", "vllm.gone has no Base"),
        ("from vllm import Early\n", "vllm has no Early"),
        (
            "from vllm.base import Base\nclass Mine(Base):\n def step(self, *, dry=False): ...\n",
            "Mine.step does not take request",
        ),
        (
            "from vllm.base import Base\nclass Mine(Base):\n def step(self, request): ...\n",
            "Mine.step does not take dry",
        ),
        (
            "from vllm.base import Base\nclass Mine(Base):\n"
            " def step(self, request, more, *, dry=False): ...\n",
            "Mine.step needs more, which vLLM does not give",
        ),
        (
            "from vllm.base import Output\nclass Done(Output):\n def get(self): ...\n",
            "Done has to write save",
        ),
        (
            "from vllm.base import Base\ndef use(base: Base):\n return base.kept.length\n",
            "Config has no length",
        ),
        (
            "from vllm.base import Base\ndef use(base: Base):\n"
            " config = base.group()\n return config.parent.length\n",
            "Config has no length",
        ),
        (
            "from vllm.base import Base\ndef make(c):\n return Base(configuration=c)\n",
            "Base takes no configuration",
        ),
        (
            "from vllm.base import Worker\nclass Mixin:\n def load(self):\n  super().unload()\n"
            "class Mine(Mixin, Worker): ...\n",
            "Worker has no unload",
        ),
        (
            "try:\n from vllm.base import A\nexcept ImportError:\n from vllm.base import B\n",
            "vllm.base has no B",
        ),
    ],
)
def test_each_kind_of_absence_is_found(own: str, finding: str) -> None:
    (found,) = _findings(own)
    assert finding in found


def test_a_place_that_only_an_older_release_has_is_no_finding() -> None:
    own = "try:\n from vllm.base import A\nexcept ImportError:\n from vllm.base import Base\n"
    assert _findings(own) == []
