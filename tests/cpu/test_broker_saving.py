"""How jobs go on with less than their peaks, as people write it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.base.units import GIB, MIB
from zico.broker.protocol.messages import MAX_SIZE_BYTES
from zico.broker.saving import MODES, PLANNERS, Wish, check_device, served_on, variables_of, wish_in, wishes_of
from zico.planning.saving.registry import DEVICE_PLANNERS, PAGERS, REDUCING
from zico.pool.layout import SaveMode

NAMES = ("a", "b=c")
ORIGINS = {"save": "--save", "limit": "ZICO_LIMIT", "tier": "--tier"}

wishes = st.builds(
    Wish,
    save=st.sampled_from(MODES),
    limit_bytes=st.integers(0, 1 << 50),
    tier=st.sampled_from(["", "memory", "memory:2GiB,file"]),
)


@given(wishes)
def test_a_job_finds_in_its_environment_what_it_was_given(wish: Wish) -> None:
    """To the last byte, and nothing is written of what is as usual."""
    assert wish_in(variables_of(wish)) == wish
    assert variables_of(Wish()) == {}


def test_the_table_and_the_protocol_number_modes_alike() -> None:
    """A job's record has a mode's place in the protocol's list."""
    assert [mode.name.lower() for mode in SaveMode] == list(MODES)
    assert [int(mode) for mode in SaveMode] == list(range(len(MODES)))


def test_one_mode_is_for_all_jobs_and_a_limit_for_one() -> None:
    """A share is one of the budget; the tier is the same for all."""
    texts = {"save": "swap", "limit": "b=c=25%", "tier": "file"}
    assert wishes_of(texts, ORIGINS, NAMES, GIB) == {
        "a": Wish("swap", 0, "file"),
        "b=c": Wish("swap", 256 * MIB, "file"),
    }


def test_jobs_may_have_different_modes() -> None:
    """Whoever is not named saves nothing."""
    assert wishes_of({"save": "b=c=page"}, ORIGINS, NAMES, GIB) == {"a": Wish(), "b=c": Wish("page")}


def test_on_a_gpu_pytorch_alone_swaps() -> None:
    """To page is all that other jobs can do there: another wish is not their record's."""
    assert [served_on("host", mode, "tensorflow") for mode in MODES] == list(MODES)
    assert [served_on("cuda", mode, "torch") for mode in MODES] == list(MODES)
    assert [served_on("cuda", mode, "jax") for mode in MODES] == ["none", "none", "page", "none"]


def test_on_a_gpu_planners_encode_nothing() -> None:
    """A planner that encodes is refused there, with those that would do."""
    for planner in PLANNERS:
        check_device("host", {"a": Wish("swap", planner=planner)}, {"save": "--save"})
    for planner in DEVICE_PLANNERS:
        check_device(
            "cuda", {"a": Wish("page"), "b": Wish("auto"), "c": Wish("swap", planner=planner)}, {"save": "--save"}
        )
    for planner in {*REDUCING, "gist"}:
        assert planner not in DEVICE_PLANNERS
        with pytest.raises(
            ConfigError, match=f"ZICO_SAVE: b cannot follow {planner} on a GPU, .* one of longest, zico, "
        ):
            check_device("cuda", {"a": Wish("page"), "b": Wish("swap", planner=planner)}, {"save": "ZICO_SAVE"})


@pytest.mark.parametrize("system", PAGERS)
def test_a_job_pages_as_a_published_system_by_name(system: str) -> None:
    """The environment says so to the last word. A GPU is refused in one sentence with the remedy."""
    assert wishes_of({"save": f"b=c={system}"}, ORIGINS, NAMES, GIB)["b=c"] == Wish("page", planner=system)
    wish = Wish("page", 3, "memory,file", planner=system)
    assert wish_in(variables_of(wish)) == wish
    check_device("host", {"a": wish}, {"save": "--save"})
    with pytest.raises(ConfigError) as refused:
        check_device("cuda", {"a": wish}, {"save": "--save"})
    said = f"--save: a cannot page as {system} does on a GPU, whose faults no program sees: give page"
    assert str(refused.value) == said


def test_dragon_needs_a_file() -> None:
    """Its pages are those of files, so tiers without one are refused, with where they were given."""
    said = r"'memory' has no file, and dragon pages files: leave it out, or give file"
    with pytest.raises(ConfigError, match=f"^--tier: {said}$"):
        wishes_of({"save": "a=dragon", "tier": "memory"}, ORIGINS, NAMES, GIB)
    with pytest.raises(ConfigError, match=f"^ZICO_TIER: {said}$"):
        wish_in({"ZICO_JOB_SAVE": "dragon", "ZICO_TIER": "memory"})


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ({"save": "often"}, "--save: 'often' is not a way to save memory: give one of none, swap, page, auto"),
        ({"save": "a=often"}, "--save: 'often' is not a way to save memory"),
        ({"save": "x=swap"}, "--save: no job is called 'x': there are a, b=c"),
        ({"save": "a=swap,a=page"}, "--save: a is given swap and page: give one"),
        ({"tier": "tape"}, "--tier: 'tape' is not a tier"),
        ({"limit": "2GiB"}, "ZICO_LIMIT: '2GiB' is not NAME=VALUE"),
        ({"limit": "a=0"}, "ZICO_LIMIT: "),
        ({"limit": "a=much"}, "ZICO_LIMIT: "),
    ],
)
def test_what_cannot_be_is_refused_with_its_origin(texts: dict[str, str], reason: str) -> None:
    """One sentence that begins with where the text came from."""
    with pytest.raises(ConfigError) as refused:
        wishes_of(texts, ORIGINS, NAMES, GIB)
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("9000000T", "ZICO_JOB_LIMIT: '9000000T' is 9000000 TiB, more than .* 8192 TiB"),
        ("1" + "0" * 400, "ZICO_JOB_LIMIT: "),
        ("60%", "ZICO_JOB_LIMIT: '60%' is a share, and a job does not know of what: give a size such as 2GiB"),
    ],
)
def test_a_limit_that_cannot_be_said_is_refused_before_it_is(text: str, reason: str) -> None:
    """What a job's own variable asks for is in the range of its greeting, or an error of the user's."""
    with pytest.raises(ConfigError, match=reason):
        wish_in({"ZICO_JOB_LIMIT": text})


def test_a_job_may_be_told_that_it_has_no_limit() -> None:
    """``none`` is no limit, as for ``zico limit``, and the largest size can be said."""
    assert wish_in({"ZICO_JOB_LIMIT": "none"}) == Wish()
    assert wish_in({"ZICO_JOB_LIMIT": "8192T"}) == Wish(limit_bytes=MAX_SIZE_BYTES)


@pytest.mark.parametrize("variable", ["ZICO_JOB_SAVE", "ZICO_JOB_LIMIT"])
def test_a_bad_variable_is_named(variable: str) -> None:
    """A job that is started by hand is told which variable is wrong."""
    with pytest.raises(ConfigError, match=f"{variable}: "):
        wish_in({variable: "x"})


def test_frozen_memory_is_shared_on_either_device() -> None:
    """A switch is on or off, and jobs on a GPU may have it, too."""
    origins = {"save": "--save", "share_frozen": "--share-frozen"}
    (wish,) = wishes_of({"share_frozen": "1"}, origins, ("a",), 1).values()
    assert wish == Wish(share_frozen=True)
    assert wish_in(variables_of(wish)) == wish
    for device in ("host", "cuda"):
        check_device(device, {"a": wish}, origins)
    with pytest.raises(ConfigError, match=r"^--share-frozen: 'maybe' is neither on nor off: give 1 or 0"):
        wishes_of({"share_frozen": "maybe"}, origins, ("a",), 1)
