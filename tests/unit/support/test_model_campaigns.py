"""The command that runs many seeds of the models: `python -m tests.model`."""

import sys

import pytest

from tests.model.__main__ import main
from tests.model.models import MODELS, Model


@pytest.mark.parametrize("model", MODELS)
def test_each_model_is_there(model: str) -> None:
    assert callable(MODELS[model].load())


def test_a_wrong_seed_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The campaign goes on, names it, and ends with rows for the record."""
    monkeypatch.setitem(MODELS, "logarithm", Model("math:log"))
    monkeypatch.setattr(
        sys, "argv", ["-", "--models=logarithm", "--seed=0", "--seeds=3", "--jobs=1"]
    )
    assert main() == 1
    printed = capsys.readouterr().out
    assert "--models logarithm --seed 0    ValueError: math domain error" in printed
    row = printed.splitlines()[-1].split(" | ")
    assert row[0] == "| logarithm"
    assert row[2].startswith("3 from 0")
    assert row[3:5] == ["2", "1"]


def test_an_unknown_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["-", "--models", "lease,lease2"])
    with pytest.raises(SystemExit):
        main()
    assert "no model lease2; there are sessions," in capsys.readouterr().err
