"""Which directories Zico takes machine code from, and where it goes when one is refused."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from zico.base import paths
from zico.base.errors import ConfigError
from zico.launch import doctor

NOBODY = 65534
ME = 1000
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Give a directory of mode 0700 in one that no other user may write."""
    directory = tmp_path / "private"
    directory.mkdir(0o700)
    return directory


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Give a directory that everybody may write."""
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    return directory


def home_at(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a home directory and let the system's list of users name it."""
    home = directory / "home"
    home.mkdir(0o700)
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: SimpleNamespace(pw_dir=str(home)))
    return home


@pytest.mark.parametrize(
    ("owner", "mode", "fault"),
    [
        (ME, stat.S_IFDIR | 0o700, ""),
        (ME, stat.S_IFDIR | 0o755, ""),
        (0, stat.S_IFDIR | 0o755, ""),
        (0, stat.S_IFDIR | 0o1777, ""),
        (ME, stat.S_IFDIR | 0o1777, ""),
        (ME, stat.S_IFLNK | 0o777, ""),
        (0, stat.S_IFLNK | 0o777, ""),
        (ME, stat.S_IFDIR | 0o770, "may be written by others"),
        (ME, stat.S_IFDIR | 0o702, "may be written by others"),
        (0, stat.S_IFDIR | 0o775, "may be written by others"),
        (0, stat.S_IFDIR | 0o777, "may be written by others"),
        (NOBODY, stat.S_IFDIR | 0o700, "belongs to another user"),
        (NOBODY, stat.S_IFDIR | 0o1777, "belongs to another user"),
        (NOBODY, stat.S_IFLNK | 0o777, "belongs to another user"),
        (ME, stat.S_IFREG | 0o600, "is not a directory"),
    ],
)
def test_what_is_on_the_way_is_ours_or_roots_and_ours_to_write(owner: int, mode: int, fault: str) -> None:
    """Of a user other than root, the rule takes own and root's directories that others cannot change, and no more."""
    assert paths._fault(os.stat_result((mode, 1, 1, 1, owner, owner, 0, 0, 0, 0)), ME) == fault


def test_a_private_directory_passes_before_and_after_it_is_made(private: Path) -> None:
    """A directory that is missing below a private one is as good as a private one."""
    assert paths.refusal(private) == ""
    assert paths.refusal(private / "a" / "b") == ""


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o775, 0o777])
def test_a_parent_that_others_may_write_is_refused_with_owner_and_mode(private: Path, mode: int) -> None:
    """A group's right to write is refused as everybody's is; the sentence names the parent and not the child."""
    child = private / "open" / "child"
    child.mkdir(0o700, parents=True)
    child.parent.chmod(mode)
    expected = f"{child.parent} may be written by others (owner {os.getuid()}, mode {mode:o})"
    assert paths.refusal(child) == expected
    assert paths.refusal(child / "missing") == expected


def test_below_a_sticky_parent_our_own_directory_passes(private: Path) -> None:
    """In a directory like /tmp our own child is safe, and the directory itself is not."""
    sticky = private / "tmp"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "own").mkdir(0o700)
    assert paths.refusal(sticky / "own") == ""
    assert "is open to others" in paths.refusal(sticky)


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o755])
def test_the_directory_of_the_code_itself_is_closed_to_others(private: Path, mode: int) -> None:
    """Numba makes directories as the umask has it, so others must not come as far as those."""
    private.chmod(mode)
    assert paths.refusal(private) == f"{private} is open to others (owner {os.getuid()}, mode {mode:o})"


@as_root
@pytest.mark.parametrize("place", ["parent", "directory", "link", "linked"])
def test_what_another_user_owns_is_refused(private: Path, place: str) -> None:
    """A parent, the directory itself, a link to a good one, or a link into another user's directory is refused."""
    parent, good = private / "parent", private / "good"
    directory = parent / "code"
    directory.mkdir(0o700, parents=True)
    good.mkdir(0o700)
    if place in {"link", "linked"}:
        directory.rmdir()
        directory.symlink_to(good)
    theirs = {"parent": parent, "directory": directory, "link": directory, "linked": good}[place]
    os.chown(theirs, NOBODY, NOBODY, follow_symlinks=False)
    assert paths.refusal(directory).startswith(f"{theirs} belongs to another user (owner {NOBODY}, ")


def test_a_link_leads_through_every_directory_that_is_looked_at(private: Path, shared: Path) -> None:
    """A link is refused if it lies in an open directory, or leads through one, be it by a second link or by dots."""
    (shared / "own").mkdir(0o700)
    (shared / "link").symlink_to(private)
    (private / "straight").symlink_to(shared / "own")
    (private / "second").symlink_to("straight")
    (private / "good").mkdir(0o700)
    (private / "dots").symlink_to(f"../{shared.name}/own/../../{private.name}/good")
    (private / "fine").symlink_to("../private/good")
    for link in (shared / "link" / "good", private / "straight", private / "second", private / "dots"):
        assert paths.refusal(link).startswith(f"{shared} may be written by others"), link
    assert paths.refusal(private / "fine") == ""


def test_a_directory_that_cannot_be_written_is_refused() -> None:
    """Where Numba could not write it would look for another directory, so such a directory is refused before."""
    assert paths.refusal(Path("/proc/none")).startswith("/proc cannot be written (")


def test_links_in_a_circle_end(private: Path) -> None:
    """A link that leads to itself is refused as the kernel refuses it."""
    (private / "a").symlink_to("b")
    (private / "b").symlink_to("a")
    assert paths.refusal(private / "a" / "code").endswith("cannot be used (Too many levels of symbolic links)")


def test_above_the_home_directory_nobody_is_asked(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to a directory in the user's home begins at the home; beside the home it begins at the root."""
    home = home_at(shared, monkeypatch)
    (shared / "beside").mkdir(0o700)
    assert paths.refusal(home / ".cache") == ""
    assert paths.refusal(shared / "beside").startswith(f"{shared} may be written by others")
    home.chmod(0o775)
    assert paths.refusal(home / ".cache").startswith(f"{home} may be written by others")


def test_the_cache_is_made_private_whatever_the_umask(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories that are missing on the way are made with mode 0700, and the code's own among them."""
    monkeypatch.setenv("ZICO_CACHE_DIR", str(private / "a" / "b"))
    before = os.umask(0)
    try:
        assert paths.cache_root() == private / "a" / "b"
    finally:
        os.umask(before)
    made = [private / "a", private / "a" / "b", paths.code_directory()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    assert made[-1].parent == private / "a" / "b"


def test_a_refused_cache_is_one_sentence_and_another_cache(
    private: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence comes once, and names the directory, its owner and mode, what is used instead and what to do."""
    monkeypatch.setenv("ZICO_CACHE_DIR", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(private))
    assert paths.cache_root() == paths.code_directory().parent == private / "zico"
    assert capsys.readouterr().err == (
        f"zico: machine code is kept in {private / 'zico'} and not in {shared}, as {shared} may be written by others "
        f"(owner {os.getuid()}, mode 777): take others' right to write away (chmod go-w), or set ZICO_CACHE_DIR to a "
        "directory of yours alone\n"
    )
    assert not list(shared.iterdir())


def test_what_was_left_in_a_cache_that_was_open_is_not_used(
    private: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed cache whose directory for code is not private, or another user's, is refused; nothing there is moved."""
    (shared / "code").mkdir()
    (shared / "code").chmod(0o777)
    if os.getuid() == 0:
        (shared / "code").chmod(0o700)
        os.chown(shared / "code", NOBODY, NOBODY)
    shared.chmod(0o700)
    monkeypatch.setenv("ZICO_CACHE_DIR", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(private))
    assert paths.code_directory() == private / "zico" / "code"


def test_when_all_are_refused_the_temporary_directory_of_the_user_is_last(
    private: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the user's cache directory and the home's comes one among temporary files, then an error with reasons."""
    home = home_at(shared, monkeypatch)
    monkeypatch.setenv("ZICO_CACHE_DIR", str(shared / "asked"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "xdg"))
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    assert paths.cache_root() == home / ".cache" / "zico"
    home.chmod(0o777)
    monkeypatch.setenv("ZICO_CACHE_DIR", str(shared / "asked again"))
    assert paths.cache_root() == private / f"zico-cache-{os.getuid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setenv("ZICO_CACHE_DIR", str(shared / "at last"))
    with pytest.raises(ConfigError, match=r"no directory for machine code: .*home may be written.*set ZICO_CACHE_DIR"):
        paths.cache_root()


def test_the_doctor_says_it_and_creates_nothing(
    private: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refused cache is a failed row with the reason, a good one a passed row; neither makes a directory."""
    monkeypatch.setenv("ZICO_CACHE_DIR", str(shared))
    row = doctor._check_cache()
    assert not row.passed
    assert row.detail.startswith(f"{shared} may be written by others")
    monkeypatch.setenv("ZICO_CACHE_DIR", str(private / "new"))
    assert doctor._check_cache() == doctor.Check("compiled code", passed=True, detail=f"kept in {private / 'new'}")
    assert not [*shared.iterdir(), *private.iterdir()]
    assert not capsys.readouterr().err
