"""What a run says of settings that the daemon which it joins has otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from zico.base.errors import ConfigError
from zico.base.settings import HOST, DeviceMemory, Setting, resolve
from zico.base.units import GIB, MIB
from zico.broker.protocol.messages import STATUS_SCHEMA, Status
from zico.cli import daemon, options
from zico.cli.broker import compare
from zico.cli.daemon import without_effect
from zico.cli.run import run

if TYPE_CHECKING:
    from typing import Any

HOST_MEMORY = DeviceMemory(total_bytes=16 * GIB, available_bytes=10 * GIB)
GPU = DeviceMemory(total_bytes=80 * GIB, available_bytes=20 * GIB, granularity_bytes=2 * MIB, is_taken_at_once=True)


def pool(**fields: Any) -> Status:  # noqa: ANN401 - of any field
    """Return a daemon's pool of 64 MiB, which may become 1 GiB."""
    usual = {"schema_version": STATUS_SCHEMA, "policy": "zico", "uptime_s": 1.0, "region_bytes": 4 * MIB, "jobs": ()}
    sizes = dict.fromkeys(("granted_bytes", "physical_bytes", "peak_granted_bytes", "peak_physical_bytes"), 0)
    return Status(**usual | sizes | {"budget_bytes": 64 * MIB, "most_bytes": GIB} | fields)


def told(status: Status, device: str = HOST, **variables: str) -> str:
    """Return what is said of variables of the environment where a run joins that pool."""
    given = {name: Setting(text, f"ZICO_{name.upper()}") for name, text in variables.items()}
    given["device"] = Setting(device, "ZICO_DEVICE")
    memory = HOST_MEMORY if device == HOST else GPU
    return without_effect(resolve(given, memory, ("zico", "serial"), n_jobs=1), given, status)


LIMIT = "or change the budget by zico limit 32MiB --device host"
RESTART = "or zico broker stop once its jobs have ended, and start it again with "


@pytest.mark.parametrize(
    ("variables", "has", "remedy"),
    [
        ({"budget": "32MiB"}, "budget 64 MiB and not 32 MiB (ZICO_BUDGET)", LIMIT),
        ({"budget": "2GiB"}, "budget 64 MiB and not 2 GiB (ZICO_BUDGET)", RESTART + "--budget"),
        ({"policy": "serial"}, "policy zico and not serial (ZICO_POLICY)", RESTART + "--policy"),
        ({"policy": "zico:a=1"}, "policy zico and not zico:a=1 (ZICO_POLICY)", RESTART + "--policy"),
        ({"region": "8MiB"}, "region 4 MiB and not 8 MiB (ZICO_REGION)", RESTART + "--region"),
        ({"reserve": "1GiB"}, "reserve 0 B and not 1 GiB (ZICO_RESERVE)", RESTART + "--reserve"),
        ({"metrics": "9185"}, "metrics none and not 9185 (ZICO_METRICS)", RESTART + "--metrics"),
        (
            {"most": "12GiB", "isolate": "1"},
            "most 1 GiB and not 12 GiB (ZICO_MOST), isolate off and not on (ZICO_ISOLATE)",
            RESTART + "--most, --isolate",
        ),
        (
            {"budget": "32MiB", "log_level": "info"},
            "budget 64 MiB and not 32 MiB (ZICO_BUDGET), log-level warning and not info (ZICO_LOG_LEVEL)",
            f"{LIMIT}, {RESTART}--log-level",
        ),
    ],
)
def test_each_setting_that_the_pool_has_otherwise_is_named(variables: dict[str, str], has: str, remedy: str) -> None:
    """With both values, where it was given, and what to do: another budget needs no other broker."""
    assert told(pool(), **variables) == f"this run joins the broker of host, which has {has}: leave that out, {remedy}"


@pytest.mark.parametrize(
    ("variables", "fields"),
    [
        ({}, {"budget_bytes": 16 * MIB, "policy": "serial", "isolated": True, "reserve_bytes": 5, "log_level": "info"}),
        ({"budget": "64MiB", "policy": "zico", "isolate": "0", "region": "4MiB", "log_level": "warning"}, {}),
        ({"budget": "67MiB"}, {"region_bytes": MIB, "budget_bytes": 67 * MIB}),
        ({"policy": "zico:a=1"}, {"parameters": "a=1"}),
        ({"reserve": "1GiB", "isolate": "1"}, {"reserve_bytes": GIB, "isolated": True}),
        ({"metrics": "9185"}, {"metrics": "http://127.0.0.1:9185/metrics"}),
        ({"metrics": "0"}, {"metrics": "http://127.0.0.1:4711/metrics"}),
        ({"metrics": "/run/m"}, {"metrics": "http://localhost/metrics at the Unix socket /run/m"}),
    ],
)
def test_what_is_as_in_the_pool_or_was_not_given_is_not_named(
    variables: dict[str, str], fields: dict[str, object]
) -> None:
    """Budgets are compared in whole regions, and defaults are nobody's wish."""
    assert told(pool(**fields), **variables) == ""


def test_metrics_elsewhere_are_named() -> None:
    """A port is not a socket, nor another port."""
    at_socket = pool(metrics="http://localhost/metrics at the Unix socket /run/m:9185/")
    assert "metrics http://localhost/metrics at the" in told(at_socket, metrics="9185")
    assert "metrics http://127.0.0.1:1/metrics and not 2 " in told(
        pool(metrics="http://127.0.0.1:1/metrics"), metrics="2"
    )


def test_mps_is_the_users_own_beside_a_daemon() -> None:
    """Only a broker that has been started beside an MPS daemon has one; not wanting one is no difference."""
    on_gpu = {"device": "cuda:0", "budget_bytes": 16 * GIB, "most_bytes": 16 * GIB, "region_bytes": 64 * MIB}
    assert told(pool(**on_gpu), "cuda:0", mps="1") == (
        "this run joins the broker of cuda:0, which has mps off and not on (ZICO_MPS): leave that out, or end the "
        "broker, start nvidia-cuda-mps-control -d, and start the broker again"
    )
    assert told(pool(**on_gpu, mps="/run/mps"), "cuda:0", mps="1") == ""
    assert told(pool(**on_gpu), "cuda:0", mps="0") == ""


def test_a_share_of_a_gpu_is_not_compared() -> None:
    """It is one of the memory that is free, which contexts of jobs have changed since the broker started."""
    on_gpu = {"device": "cuda:0", "budget_bytes": 16 * GIB, "most_bytes": 16 * GIB, "region_bytes": 64 * MIB}
    for text in ("50%", "none"):
        assert told(pool(**on_gpu), "cuda:0", budget=text) == ""
    assert "budget 16 GiB and not 10 GiB (ZICO_BUDGET)" in told(pool(**on_gpu), "cuda:0", budget="10GiB")
    assert "budget 64 MiB and not 8 GiB (ZICO_BUDGET)" in told(pool(), budget="50%")


def test_a_gpus_budget_may_be_what_the_pool_to_join_has() -> None:
    """What the daemon has taken of the GPU counts as free where its pool is joined: 60 GiB of it are not refused."""

    def on(device: Setting[str], _shared_by: int) -> DeviceMemory:
        assert device.value == "cuda:0"
        return GPU

    with mock.patch.object(options, "memory_of", on):
        words = ["--device", "cuda:0", "--budget", "60GiB", "--", "true"]
        ctx = run.make_context("run", words)
        (settings,) = options.settings_of_each(ctx, 1, {"cuda:0": 60 * GIB})
        assert settings.budget_bytes.value == 60 * GIB
        with pytest.raises(ConfigError, match="but 20 GiB of the device's 80 GiB are free"):
            options.settings_of_each(ctx, 1)
        with mock.patch.object(daemon, "BrokerClient") as client:
            had = pool(device="cuda:0", budget_bytes=60 * GIB, most_bytes=60 * GIB, physical_bytes=60 * GIB)
            client.return_value.__enter__.return_value.status.return_value = had
            assert daemon.told_to_script(compare.make_context("compare", words[:4]), Path("socket")) == ""
