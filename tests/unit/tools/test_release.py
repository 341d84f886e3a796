"""A tree is a release only if everything names the same version."""

import re
import subprocess
from pathlib import Path

import pytest

from tools.release import Release, ReleaseError

CHANGELOG = "# Changelog\n\n## 0.2.0 (unreleased)\n\n- new\n\n## 0.1.0 (2026-01-01)\n\n- old\n"

USERS = {
    "deploy/compose/single.yml": 'image: "holdfast:0.1.0"\nother: postgres:17.0.1\n',
    "deploy/kubernetes/kustomization.yaml": 'images:\n  - name: holdfast\n    newTag: "0.1.0"\n',
    "docs/install.md": "apt install ./holdfast_0.1.0_amd64.deb\npip install holdfast-0.1.0.whl\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    package = tmp_path / "src" / "holdfast"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Holdfast."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "holdfast"\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    for name, text in USERS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def commit(tree: Path) -> None:
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)


def test_a_release(tree: Path) -> None:
    release = Release(tree)
    commit(tree)
    assert list(release.problems()) == [
        "CHANGELOG.md: the newest section is 0.2.0, the version is 0.1.0",
        "tests/data/formats/0.1.0: no directories: tools/formats.py --release",
    ]
    release.prepare("0.2.0")
    assert release.version == release.section()[0] == "0.2.0"
    assert "## 0.1.0 (2026-01-01)" in release.changelog.read_text()
    for name, text in USERS.items():
        assert (tree / name).read_text() == text.replace("0.1.0", "0.2.0")
    kept = tree / "tests" / "data" / "formats" / "0.2.0" / "node.tar.gz"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"")
    assert list(release.problems()) == ["git: there are changes that are not committed"]
    commit(tree)
    assert not list(release.problems())
    subprocess.run(["git", "-C", str(tree), "tag", "v0.2.0"], check=True)
    assert list(release.problems()) == ["git: the tag v0.2.0 exists: choose the next version"]


def test_a_release_keeps_its_section(tree: Path) -> None:
    """Without a section of its own, the next version would take the name of the last one."""
    release = Release(tree)
    release.prepare("0.2.0")
    before = release.changelog.read_text()
    with pytest.raises(ReleaseError, match=r"begin one for this version, ## 0\.3\.0"):
        release.prepare("0.3.0")
    assert release.changelog.read_text() == before
    assert release.version == "0.2.0"


def test_versions_that_differ(tree: Path) -> None:
    release = Release(tree)
    release.prepare("0.2.0")
    release.package.write_text('__version__ = "0.1.9"\n')
    release.changelog.write_text(CHANGELOG.replace("- new\n", ""))
    commit(tree)
    problems = list(release.problems())
    assert problems[0] == "__init__.py: __version__ is not 0.2.0, as in pyproject.toml"
    assert "CHANGELOG.md: 0.2.0 is (unreleased), not a date: tools/release.py prepare" in problems
    assert "CHANGELOG.md: nothing stands under 0.2.0" in problems


def test_a_user_of_another_version(tree: Path) -> None:
    release = Release(tree)
    release.prepare("0.2.0")
    (tree / "docs/install.md").write_text(USERS["docs/install.md"])
    assert "docs/install.md: names another version than 0.2.0" in release.problems()


def test_this_tree_names_one_version() -> None:
    release = Release(Path(__file__).parents[3])
    assert not [each for each in release.problems() if "names another version" in each]
    assert release.section()[0] == release.version
    assert f'__version__ = "{release.version}"' in release.package.read_text()


def test_what_contributors_are_told_to_run_is_there() -> None:
    root = Path(__file__).parents[3]
    text = (root / "CONTRIBUTING.md").read_text()
    named = re.findall(r"(?:docs|examples|src|tests|tools)/[\w./-]*\w", text)
    assert len(named) > 10
    assert not [name for name in named if not (root / name).exists()]
    targets = set(re.findall(r"make ([a-z]+)", text))
    makefile = (root / "Makefile").read_text()
    assert "release" in targets
    assert not [each for each in targets if f"\n{each}:" not in makefile]
