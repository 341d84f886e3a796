"""The model of a node's ceiling by cores, and its tables in docs/io-workers.md."""

import json
from pathlib import Path

import pytest

from bench.ceiling import Form, forms, render

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_has_the_tables_of_its_figures() -> None:
    rows = json.loads((DOCS / "io-workers.json").read_text())
    text = (DOCS / "io-workers.md").read_text()
    shown = text.partition("<!-- ceiling -->")[2].partition("<!-- end of ceiling -->")[0]
    assert shown.strip() == render(rows).strip()


def test_the_slower_stage_is_the_limit() -> None:
    form = Form("tcp", 0, alone_us=5.0, core_us=2.0, workers_us=5.0)
    # Two cores: one worker is slower than the broker's process. Four: the process is.
    assert [form.ceiling(cores) for cores in (1, 2, 3, 4, 64)] == pytest.approx(
        [200_000, 200_000, 400_000, 500_000, 500_000]
    )
    assert form.cores_at_limit() == 4
    assert form.scaled(10_000) == pytest.approx(500_000, rel=0.01)
    # The law lets a core do the work of both stages, so it may be above on two cores.
    assert all(form.scaled(cores) <= form.ceiling(cores) for cores in (3, 4, 64))


def test_a_form_needs_runs_with_and_without_a_worker() -> None:
    row = {"transport": "tls", "qos": 1, "broker_us": 3.0, "workers_us": 4.0}
    assert forms([{**row, "workers": 1}]) == []
    assert forms([{**row, "workers": 2}, {**row, "workers": 0}]) == []
    (form,) = forms([{**row, "workers": 1}, {**row, "workers": 0, "broker_us": 6.0}])
    assert form == Form("tls", 1, 6.0, 3.0, 4.0)
