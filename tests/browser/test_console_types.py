"""The JSDoc types of the console's modules, checked by TypeScript from npm."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Final

import pytest

import holdfast

pytestmark = pytest.mark.long
SITE: Final = Path(holdfast.__file__).parent / "api" / "console" / "site"
CHECKER: Final = "typescript@5"
OPTIONS: Final = {
    "checkJs": True, "strict": True, "noEmit": True, "skipLibCheck": True, "target": "es2022",
    "module": "es2022", "moduleResolution": "bundler", "types": [],
    "lib": ["es2023", "dom", "dom.iterable"],
}  # fmt: skip


def test_the_types_of_the_modules_are_right(tmp_path: Path) -> None:
    """The libraries are replaced by the types of the same versions, as npm has them."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm")
    shutil.copytree(SITE, tmp_path / "site")
    vendor = tmp_path / "site" / "vendor"
    packages = tomllib.loads((vendor / "VENDOR.toml").read_text())["package"]
    for package in packages:
        for file in package["files"]:
            path = vendor / file["file"]
            exported = "{ default }" if "export" in file else "*"
            types = f'export {exported} from "{file["imported_as"]}";\n'
            path.with_suffix(".d.ts").write_text(types)
            path.unlink()
    wanted = [f"{each['name']}@{each['version']}" for each in packages]
    (tmp_path / "package.json").write_text("{}")
    subprocess.run(
        [npm, "install", "--silent", "--ignore-scripts", CHECKER, *wanted],
        cwd=tmp_path, check=True, timeout=240,
    )  # fmt: skip
    config = {"compilerOptions": OPTIONS, "files": ["site/app.js"]}
    (tmp_path / "tsconfig.json").write_text(json.dumps(config))
    checked = subprocess.run(
        [tmp_path / "node_modules/.bin/tsc", "-p", "."],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
