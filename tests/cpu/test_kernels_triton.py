"""The kernels' forms in Triton become PTX that drivers take; no GPU is needed. ``make test-triton`` runs this."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed: make test-triton")

from zico.kernels import triton_forms
from zico.kernels.compilation import NEWEST_PTX_VERSION

CAPABILITIES = [(7, 0), (8, 0), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda one: f"sm_{one[0]}{one[1]}")
@pytest.mark.parametrize("form", triton_forms.FORMS, ids=lambda form: form.of.name)
def test_a_form_becomes_ptx(form: triton_forms.Form, capability: tuple[int, int]) -> None:
    """It has the entry that a launch names, takes two addresses more at most, and no newer version than CUDA 13.0's.

    A launch gives two. Triton before 3.5 takes one of them, and the driver reads as many as a kernel takes.
    """
    made = triton_forms.image(form, capability)
    text = made.ptx.decode()
    ((major, minor),) = re.findall(r"^\.version (\d+)\.(\d+)$", text, re.MULTILINE)
    assert (int(major), int(minor)) <= NEWEST_PTX_VERSION
    assert f".entry {made.name}(" in text
    n_parameters = len(form.signature) - len(form.constants)
    assert text.count(".param .u64 ") >= n_parameters
    assert f"{made.name}_param_{n_parameters}" in text
    assert f"{made.name}_param_{n_parameters + 2}" not in text


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda one: f"sm_{one[0]}{one[1]}")
def test_a_mark_is_ordered_for_the_whole_system(capability: tuple[int, int]) -> None:
    """What the thread has seen and written before is seen by every process and the processor before the counter is."""
    text = triton_forms.image(triton_forms.MARK, capability).ptx.decode()
    assert len(re.findall(r"atom\.global\.sys\.release\.exch\.b64", text)) == 1
