"""What `holdfast federation manager` makes of its arguments."""

import pytest

from holdfast.cli.main import main
from holdfast_federation.cli.manager import ManagerError, ManagerPort


@pytest.mark.parametrize("url", ["http://m:8080", "http://m:8080/", "http://m:8080/api/v1/join"])
def test_a_managers_url_may_be_the_published_one(url: str) -> None:
    assert ManagerPort(url).url == "http://m:8080"


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(ManagerError, match="write http://host:8080"):
        ManagerPort("m:8080")


def test_a_manager_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federation", "manager", "nodes", "--url", "http://127.0.0.1:1/api/v1/join"]) == 1
    assert "http://127.0.0.1:1 cannot be asked" in capsys.readouterr().err
