"""Build what setup.cfg describes, and put ``zico.pth`` beside the packages."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = Path("zico", "job", "zico.pth")


class BuildPy(build_py):
    """Python reads ``.pth`` files at the root of site-packages only, and no setting of setup.cfg puts one there."""

    def run(self) -> None:
        """Build the packages and the file; an editable wheel takes nothing from the folder of a build."""
        super().run()
        root = self.distribution.get_command_obj("install").install_lib if self.editable_mode else self.build_lib
        self.copy_file(str(PTH), str(Path(root, PTH.name)))


setup(cmdclass={"build_py": BuildPy})
