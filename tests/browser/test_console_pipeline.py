"""The tables of a pipeline as a graph, and the question what a client may do."""

import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.pages import ConsolePage
from tests.e2e.conftest import StartHoldfast
from tests.support.api_client import Api

pytestmark = pytest.mark.long


def report() -> dict[str, Any]:
    """The report of a job whose lake has three tables, of which one has failed."""
    tables = (("records", "bronze", "http://127.0.0.1"), ("readings", "silver", "records"),
              ("minutes", "gold", "readings"))  # fmt: skip
    return {
        "lake": "/var/lib/lake", "host": "spark-1", "state": "running", "every_s": 10,
        "began_us": int(time.time() * 1e6), "trigger_s": 5, "offsets": {},
        "tables": [
            {"name": name, "layer": layer, "source": source, "rows": 1000, "lag": at,
             "quarantined": 7 * (at == 1), "error": "no column <b>" if at == 2 else ""}
            for at, (name, layer, source) in enumerate(tables)
        ],
    }  # fmt: skip


def test_a_pipeline_is_seen_as_its_job_reports_it(
    start_holdfast: StartHoldfast, tmp_path: Path, page: ConsolePage
) -> None:
    rules = tmp_path / "acl.txt"
    rules.write_text("topic readwrite plant/#\n")
    broker = start_holdfast(settings={"security": {"acl_file": str(rules)}})
    api, view = Api(broker.admin_port), page.page
    page.open(broker.admin_port, "#/pipeline")
    expect(view.get_by_role("heading", name="No pipeline has reported")).to_be_visible()
    api.post("pipeline", report(), name="plant")
    expect(view.get_by_text("The job runs.")).to_be_visible()
    expect(view.locator(".graph .box")).to_have_count(3)
    expect(view.locator(".graph .flow")).to_have_count(2)
    expect(view.locator(".graph .box.warn")).to_contain_text("readings")
    view.locator(".graph .box.bad").click()
    details = view.get_by_role("complementary")
    expect(details).to_contain_text("no column <b>")
    expect(details).to_contain_text("readings")
    view.get_by_role("button", name="Forget…").click()
    view.get_by_role("dialog").get_by_role("button", name="Forget").click()
    expect(view.get_by_role("heading", name="No pipeline has reported")).to_be_visible()

    page.open(broker.admin_port, "#/access")
    view.get_by_label("Client id").fill("pump")
    view.get_by_label("Topic, or filter").fill("plant/1")
    expect(view.locator(".sentence")).to_contain_text("may publish to 'plant/1'")
    expect(view.get_by_role("region", name="Rules")).to_contain_text("topic readwrite plant/#")
    view.get_by_label("Topic, or filter").fill("other/1")
    expect(view.locator(".sentence")).to_contain_text("may not publish to 'other/1'")
    view.get_by_label("Action").select_option("subscribe")
    view.get_by_label("Topic, or filter").fill("#")
    expect(view.locator(".sentence .badge")).to_have_text("partly")
