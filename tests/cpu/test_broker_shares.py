"""Weights, priorities, guarantees and shares of the processors as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.broker.protocol.messages import MAX_PRIORITY, MAX_SLO, MAX_WEIGHT, Share
from zico.broker.shares import parse_slo, share_in, shares_of, variables_of

NAMES = ("a", "b=c")
ORIGINS = {"weight": "--weight", "priority": "--priority", "slo": "ZICO_SLO", "compute": "--compute"}

shares = st.builds(
    Share,
    weight=st.floats(0, MAX_WEIGHT, exclude_min=True),
    priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY),
    slo=st.none() | st.floats(0, MAX_SLO, exclude_min=True),
    compute=st.floats(0, 1, exclude_min=True),
)


@given(shares)
def test_a_job_finds_in_its_environment_what_it_was_given(share: Share) -> None:
    """To the last bit, and nothing is written of what is as usual."""
    assert share_in(variables_of(share)) == share
    assert variables_of(Share()) == {}


def test_each_job_gets_what_names_it() -> None:
    """Names may have an equals sign in them, the same thing may be said twice, and whoever is not named is as usual."""
    texts = {"weight": "b=c=2, b=c=2.0", "priority": "", "slo": "a=10%,b=c=0.25", "compute": "a=30%, b=c=0.5"}
    given_to = {"a": Share(slo=0.1, compute=0.3), "b=c": Share(weight=2.0, slo=0.25, compute=0.5)}
    assert shares_of(texts, ORIGINS, NAMES) == given_to
    assert parse_slo("None") is None


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ({"weight": "2"}, "--weight: '2' is not NAME=VALUE"),
        ({"weight": "x=2"}, "--weight: no job is called 'x': there are a, b=c"),
        ({"weight": "a=2,a=3"}, "--weight: a is given 2.0 and 3.0: give one"),
        ({"weight": "a=-1"}, "--weight: '-1' is not a weight"),
        ({"weight": "a=nan"}, "--weight: 'nan' is not a weight"),
        ({"weight": "a=inf"}, "--weight: 'inf' is not a weight"),
        ({"priority": "a=high"}, "--priority: 'high' is not a priority"),
        ({"priority": "a=1001"}, "--priority: '1001' is not a priority"),
        ({"slo": "a=-5%"}, "ZICO_SLO: '-5%' is not a guarantee"),
        ({"priority": "a=1", "slo": "b=c=10%"}, "b=c is guaranteed its speed, but a of higher priority"),
        ({"slo": "a=0"}, "ZICO_SLO: '0' is not a guarantee"),
        ({"compute": "30%"}, "--compute: '30%' is not NAME=VALUE: give the job's name too, such as a=30%"),
        ({"compute": "a=30%,a=40%"}, "--compute: a is given 0.3 and 0.4: give one"),
        *(
            ({"compute": f"a={text}"}, f"--compute: {text!r} is not a share of the processors: give one above 0%")
            for text in ("0", "0%", "-5%", "101%", "30", "nan", "inf", "all", "%")
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_origin(texts: dict[str, str], reason: str) -> None:
    """One sentence; that about a single text begins with where it came from."""
    with pytest.raises(ConfigError) as refused:
        shares_of(texts, ORIGINS, NAMES)
    assert str(refused.value).startswith(reason)


def test_a_bad_variable_is_named() -> None:
    """A job that is started by hand is told which variable is wrong."""
    with pytest.raises(ConfigError, match="ZICO_JOB_WEIGHT: 'heavy' is not a weight"):
        share_in({"ZICO_JOB_WEIGHT": "heavy"})
