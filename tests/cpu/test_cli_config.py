"""Settings: precedence, origins, and refusals that say what would be accepted."""

import pytest

from zico.config import DEFAULT_REGION_BYTES, DeviceMemory, Flags, Settings, resolve
from zico.errors import ConfigError
from zico.units import GIB, MIB

MEMORY = DeviceMemory(total_bytes=16 * GIB, available_bytes=10 * GIB)
POLICIES = ("zico", "serial")


def resolved(flags: Flags | None = None, **environ: str) -> Settings:
    """Resolve against a machine of 16 GiB with 10 GiB available."""
    return resolve(flags or Flags(), environ, MEMORY, POLICIES)


def test_a_flag_beats_the_environment_and_that_beats_the_default() -> None:
    """Each setting comes from the flag, else from the variable, else from the default, and says which."""
    both = resolved(Flags(budget="1G"), ZICO_BUDGET="2G", ZICO_POLICY="serial")
    assert (both.budget_bytes.value, both.budget_bytes.origin) == (GIB, "--budget")
    assert (both.policy.value, both.policy.origin) == ("serial", "ZICO_POLICY")
    assert (both.device.value, both.device.origin) == ("host", "default")
    assert resolved(ZICO_BUDGET="").budget_bytes.origin.startswith("default")


def test_the_default_budget_is_80_percent_of_what_is_available() -> None:
    """Without a budget a run takes 80 % of the available memory in whole regions, and says so."""
    budget = resolved().budget_bytes
    assert budget.value == 8 * GIB
    assert budget.origin == "default: 80 % of the 10 GiB available"


def test_percent_and_none_are_of_the_whole_device() -> None:
    """A percentage and ``none`` refer to the device's memory, not to what is available."""
    assert resolved(Flags(budget="50%")).budget_bytes.value == 8 * GIB
    assert resolved(Flags(budget="none")).budget_bytes.value == 16 * GIB


def test_the_budget_is_rounded_down_to_whole_regions() -> None:
    """What does not fill a region is left out, so that the budget is never exceeded."""
    assert resolved(Flags(budget="10MiB")).budget_bytes.value == 2 * DEFAULT_REGION_BYTES
    assert resolved(Flags(budget="10MiB", region="1MiB")).budget_bytes.value == 10 * MIB


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (Flags(budget="0"), "more than zero"),
        (Flags(budget="-1G"), "is no size"),
        (Flags(budget="17G"), "more than the device's 16 GiB"),
        (Flags(budget="lots"), "--budget: 'lots' is no size"),
        (Flags(budget="1MiB"), "less than one region"),
        (Flags(region="3MiB"), "power of two"),
        (Flags(region="4K"), "power of two from 64 KiB"),
        (Flags(device="cuda:0"), "the CUDA device is not built in this version"),
        (Flags(device="tpu"), "the only one in this version is host"),
        (Flags(policy="fast"), "give one of zico, serial"),
        (Flags(log_level="loud"), "give one of debug"),
        (Flags(grace="soon"), "give seconds"),
        (Flags(grace="-1"), "give seconds"),
        (Flags(grace="nan"), "give seconds"),
    ],
)
def test_nonsense_is_refused_with_what_would_be_accepted(flags: Flags, says: str) -> None:
    """Every setting that cannot be used is refused with its origin and a remedy."""
    with pytest.raises(ConfigError, match=says):
        resolved(flags)


def test_an_error_in_the_environment_names_the_variable() -> None:
    """The message about a wrong variable begins with its name."""
    with pytest.raises(ConfigError, match=r"^ZICO_BUDGET: "):
        resolved(ZICO_BUDGET="x")
