"""`python -m tests.transcripts --write [NAME ...]` plays the transcripts and writes their files.

Without `--write` it prints them. `--seed N` prints the scene of a seed, which need not have a file.
"""

import argparse
import logging

from tests.transcripts import scenes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.transcripts", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*", help="of scenes; all without one")
    options = parser.parse_args()
    logging.getLogger("holdfast").setLevel(logging.CRITICAL + 1)
    for name in options.names or scenes.scene_names():
        path = scenes.SCENES / f"{name}.txt"
        scene, before = scenes.read_scene(path)
        text = scenes.render(scene)
        if not options.write:
            print(text)
        elif text != before:
            path.write_text(text)
            print(f"written: {path.name}")


if __name__ == "__main__":
    main()
