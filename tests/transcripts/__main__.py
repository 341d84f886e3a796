"""`python -m tests.transcripts --write [NAME ...]` plays the transcripts and writes their files.

Without `--write` it prints them. `--seed N` prints the scene of a seed, which need not have a file.
"""

import argparse
import logging
from pathlib import Path

from tests.transcripts import scenes, stories


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.transcripts", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*", help="of scenes and stories; all without one")
    options = parser.parse_args()
    logging.getLogger("holdfast").setLevel(logging.CRITICAL + 1)
    for name in options.names or scenes.scene_names() + stories.story_names():
        path, before, text = play(name)
        if not options.write:
            print(text)
        elif text != before:
            path.write_text(text)
            print(f"written: {path.name}")


def play(name: str) -> tuple[Path, str, str]:
    """The file of a scene or a story, its text, and the text that it has if it is played now."""
    path = stories.STORIES / f"{name}.txt"
    if path.exists():
        story, before = stories.read_story(path)
        return path, before, stories.render(story)
    path = scenes.SCENES / f"{name}.txt"
    scene, before = scenes.read_scene(path)
    return path, before, scenes.render(scene)


if __name__ == "__main__":
    main()
