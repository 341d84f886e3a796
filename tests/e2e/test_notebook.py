"""examples/log.ipynb, executed in a kernel as Jupyter does it."""

from pathlib import Path

import pytest

pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("duckdb")
pytest.importorskip("polars")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "log.ipynb"


@pytest.mark.long
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from traitlets.config import Config

    monkeypatch.chdir(tmp_path)  # the sockets of the kernel are here
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [each for each in notebook.cells if each.cell_type == "code"]
    assert not any(each.outputs for each in cells), "the notebook is kept without results"
    config = Config({"KernelManager": {"transport": "ipc"}})
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", config=config).execute()
    shown = [
        "".join(output["data"]["text/plain"] for output in each.outputs if "data" in output)
        for each in cells
    ]
    assert "44.5" in shown[2], "the mean of each machine"
    assert "69.0" in shown[3], "the maximum of each topic"
    assert shown[4] == "(300, [('plant/2/temperature', b'99.5')])"
    assert not any(output.output_type == "error" for each in cells for output in each.outputs)
