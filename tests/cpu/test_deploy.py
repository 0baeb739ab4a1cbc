"""The files of ``deploy/`` are what their readers take them for."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from zico import __version__

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
API = "1.37"
"""Of Kubernetes."""


def manifests(name: str) -> list[dict[str, Any]]:
    """Return what a file says, document by document."""
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


@pytest.mark.parametrize("name", [path.name for path in MANIFESTS])
def test_manifests_are_of_the_published_schema(name: str) -> None:
    """No field is misspelt, missing or of another type."""
    for manifest in manifests(name):
        kubernetes_validate.validate(manifest, API, strict=True)


def test_the_schema_refuses_a_field_that_there_is_not() -> None:
    """So that the test above can fail."""
    wrong = manifests("slice.yaml")[1]
    wrong["spec"]["devices"][0]["consumesCounter"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, API, strict=True)


def test_jobs_find_the_broker_of_their_node() -> None:
    """Broker and job have one user, one directory and one label."""
    broker, job = (manifests(name)[0]["spec"]["template"]["spec"] for name in ("broker.yaml", "job.yaml"))
    assert broker["securityContext"] == job["securityContext"]
    assert broker["nodeSelector"] == job["nodeSelector"]
    places = [one["hostPath"]["path"] for each in (broker, job) for one in each["volumes"] if one["name"] == "pool"]
    assert len(places) == 2
    assert places[0] == places[1]
    variables = [one for each in (broker, job) for one in each["containers"][0]["env"] if one["name"].startswith("XDG")]
    assert len(variables) == 2
    assert variables[0] == variables[1]
    images = {one["image"] for each in (broker, job) for one in each["containers"]}
    assert images == {f"zico:{__version__}"}


def test_what_jobs_keep_and_the_largest_rise_make_up_the_pool() -> None:
    """The counter in the slice is what its comment says: the budget less the largest rise."""
    counters, devices = (one["spec"] for one in manifests("slice.yaml"))
    kept = int(counters["sharedCounters"][0]["counters"]["kept"]["value"].removesuffix("Gi"))
    rises = [
        int(one["capacity"]["peak"]["value"].removesuffix("Gi"))
        - int(one["consumesCounters"][0]["counters"]["kept"]["value"].removesuffix("Gi"))
        for one in devices["devices"]
    ]
    text = (DEPLOY / "kubernetes" / "slice.yaml").read_text()
    assert f"a pool of {kept + max(rises)} GiB" in text


@pytest.mark.parametrize("path", sorted((DEPLOY / "slurm").glob("zico-*")), ids=lambda path: path.name)
def test_scripts_are_of_the_shell_and_may_be_run(path: Path) -> None:
    """The shell reads them without a word."""
    assert path.stat().st_mode & 0o111
    done = subprocess.run(["sh", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
