"""The files of an image that its base has not."""

from __future__ import annotations

from pathlib import Path

from stagetap_image.overlay import copy_overlay


def test_files_keep_place_mode_and_time(tmp_path: Path) -> None:
    real = tmp_path / "real" / "bin"
    real.mkdir(parents=True)
    (tmp_path / "real").chmod(0o711)
    program = real / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (real / "link").symlink_to("program")
    (tmp_path / "linked").symlink_to("real")
    overlay = tmp_path / "overlay"
    size = copy_overlay({tmp_path / "linked" / "bin" / "program", real / "link"}, overlay)
    copied = overlay / program.relative_to("/")
    assert copied.read_text() == "#!/bin/sh\n"
    assert copied.stat().st_mode == program.stat().st_mode
    assert copied.stat().st_mtime_ns == program.stat().st_mtime_ns
    assert copied.with_name("link").readlink() == Path("program")
    assert copied.parent.parent.stat().st_mode & 0o777 == 0o711
    assert not (overlay / (tmp_path / "linked").relative_to("/")).exists()
    assert size == len("#!/bin/sh\n") + len("program")
