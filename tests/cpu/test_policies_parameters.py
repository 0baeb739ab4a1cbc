"""What policies and devices can be told on a command line, and the sentences for what they cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.cli.options import settings_with
from zico.lab.simulator.device_models import DEVICE_MODELS, device_model_named
from zico.scheduler.parameters import Parameter, Unit, split, values
from zico.scheduler.policies import POLICIES, REAL, check_real, policy_named

SOME = (
    Parameter("poll", "1ms", Unit.TIME, "", least="1us"),
    Parameter("ramp", "0.7", Unit.SHARE, ""),
    Parameter("lanes", "0", Unit.COUNT, ""),
    Parameter("order", "pack", Unit.CHOICE, "", ("pack", "fifo")),
)


def told(text: str) -> tuple[float, ...]:
    """Return the values of those parameters for a text."""
    name, rest = split(text)
    return values(name, SOME, rest)


def test_what_is_not_said_is_as_by_default() -> None:
    """Values come in the order of their declaration, in nanoseconds, shares, counts and numbers of choices."""
    assert told("x") == told("x:") == (1e6, 0.7, 0, 0)
    assert told("x:order=fifo,poll=250us") == (250e3, 0.7, 0, 1)
    assert told("x:lanes=3,ramp=85%") == (1e6, 0.85, 3, 0)


@pytest.mark.parametrize(
    ("text", "nanoseconds"), [("2ns", 2), ("2us", 2e3), ("2ms", 2e6), ("2s", 2e9), ("2min", 120e9), ("0.5s", 5e8)]
)
def test_times_have_units(text: str, nanoseconds: float) -> None:
    """A number and a unit, from nanoseconds to minutes."""
    assert Parameter("t", "1s", Unit.TIME, "").parse(text) == nanoseconds


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x:poll", "x: 'poll' is not a parameter: give KEY=VALUE, as in x:KEY=VALUE,KEY=VALUE"),
        ("x:poll=", "x: 'poll=' is not a parameter: give KEY=VALUE, as in x:KEY=VALUE,KEY=VALUE"),
        ("x:poll=1ms,,ramp=1", "x: '' is not a parameter: give KEY=VALUE, as in x:KEY=VALUE,KEY=VALUE"),
        ("x:poll=1ms,poll=2ms", "x: poll is given twice, as 1ms and as 2ms: give it once"),
        ("x:pol=1ms", "x has no parameter 'pol': it has poll=1ms, ramp=0.7, lanes=0, order=pack"),
        ("x:poll=1", "x: poll=1 is not a time: give a number and one of ns, us, ms, s, min, as in poll=1ms"),
        ("x:poll=-1ms", "x: poll=-1ms is not a time: give a number and one of ns, us, ms, s, min, as in poll=1ms"),
        ("x:poll=infs", "x: poll=infs is not a time: give a number and one of ns, us, ms, s, min, as in poll=1ms"),
        ("x:poll=1ns", "x: poll=1ns is too little: give 1us or more"),
        ("x:ramp=1.5", "x: ramp=1.5 is not a share: give a number from 0 to 1, or a percentage, as in ramp=0.7"),
        ("x:ramp=nan", "x: ramp=nan is not a share: give a number from 0 to 1, or a percentage, as in ramp=0.7"),
        ("x:lanes=2.5", "x: lanes=2.5 is not a count: give a whole number from 0 on, as in lanes=0"),
        ("x:order=best", "x: order=best is not a choice: give one of pack, fifo"),
    ],
)
def test_what_cannot_be_used_is_named(text: str, sentence: str) -> None:
    """One sentence with the parameter, the value and what to give."""
    with pytest.raises(ConfigError) as caught:
        told(text)
    assert str(caught.value) == sentence


def test_nothing_can_be_told_to_a_policy_without_parameters() -> None:
    """It says that it has none."""
    with pytest.raises(ConfigError, match=r"^serial has no parameter 'quantum': it has none$"):
        policy_named("serial:quantum=1s")


@given(text=st.text(max_size=20))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_any_text_is_understood_or_refused(text: str) -> None:
    """Whatever stands behind the name gives a value for each parameter, or one sentence."""
    try:
        found = told(f"x:{text}")
    except ConfigError as error:
        said = str(error)
    else:
        said = f"x of {len(found)}"
    assert said == f"x of {len(SOME)}" or said.startswith(("x: ", "x has no parameter"))


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_declares_itself(name: str) -> None:
    """It says what it has to know, what each parameter means, and accepts all its own defaults."""
    policy = policy_named(name)
    spelled = ",".join(f"{parameter.name}={parameter.default}" for parameter in policy.parameters)
    assert policy_named(f"{name}:{spelled}").options.tolist() == policy.options.tolist()
    assert all(parameter.meaning for parameter in policy.parameters)
    assert (name in REAL) == policy.capabilities.runs


def test_two_of_a_name_have_nothing_in_common() -> None:
    """What one is told or remembers is not the other's."""
    one, other = policy_named("shift:poll=5ms"), policy_named("shift")
    assert one.options[0] == 5e6
    assert other.options[0] == 1e6
    assert one.memory is not other.memory


def test_brokers_refuse_what_only_a_simulator_can_do() -> None:
    """The sentence names the policy, says why, and lists those that brokers run; their parameters are checked."""
    for name in set(POLICIES) - set(REAL):
        with pytest.raises(ConfigError, match=rf"^'{name}' .* only zico simulate .* choose one of zico, shift, claims"):
            check_real(f"{name}")
    with pytest.raises(ConfigError, match="no parameter 'pol'"):
        check_real("shift:pol=1ms")
    for name in REAL:
        check_real(name)


def test_zico_run_says_where_a_refused_policy_came_from() -> None:
    """The flag is named before the sentence, for a policy that cannot run and for a parameter that is none."""
    for text, why in (("mps", "only zico simulate"), ("salus:order=best", "is not a choice")):
        with pytest.raises(ConfigError, match=rf"^--policy: .*{why}"):
            settings_with(["--policy", text, "--budget", "1GiB"])
    assert settings_with(["--policy", "shift:poll=2ms", "--budget", "1GiB"]).policy.value == "shift:poll=2ms"


def test_checking_a_name_loads_no_compiler() -> None:
    """The usual case of a command line, a name alone, waits for nothing."""
    code = "import sys, zico.scheduler.policies as found; found.check_real('zico'); sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_devices_are_found_and_told_how_much_a_job_uses() -> None:
    """As many jobs as fit are not slowed, more divide the device; unless told, jobs do not slow each other."""
    model = device_model_named("v100-32gb:utilisation=0.6,run-ahead=2ms")
    assert model.slowdown[:4] == pytest.approx((1, 1, 1.2, 1.8))
    assert model.run_ahead_ns == 2_000_000
    assert {device_model_named(name).slowdown for name in DEVICE_MODELS} == {(1.0,)}


def test_a_page_fault_costs_more_than_a_copy() -> None:
    """On every device, by the figures that it states."""
    for model in DEVICE_MODELS.values():
        assert model.region_fault_ns(1 << 26) > model.region_copy_ns(1 << 26) > 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("v100", "'v100' is not a device model: give one of v100-16gb, v100-32gb"),
        ("h200:speed=2", "h200 has no parameter 'speed': it has utilisation=0, run-ahead=0ms"),
        ("h200:utilisation=2", "h200: utilisation=2 is not a share"),
    ],
)
def test_devices_that_there_are_not_are_refused(text: str, sentence: str) -> None:
    """With what there is."""
    with pytest.raises(ConfigError) as caught:
        device_model_named(text)
    assert str(caught.value).startswith(sentence)
