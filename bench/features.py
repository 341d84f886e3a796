"""Features of Holdfast whose cost a message is measured: the settings that switch each on."""

from pathlib import Path

RULES = 10_000
"""The lines of the access control list."""


def settings(feature: str, directory: Path) -> str:
    """The configuration of a feature, with its files in the directory."""
    if feature == "acl":
        lines = [f"pattern readwrite fleet/{number}/%c/#" for number in range(RULES // 2)]
        lines += [f"topic read site/{number}/+/state" for number in range(RULES // 2 - 1)]
        # The topics of the measurement are the last rule's.
        (directory / "acl").write_text("\n".join([*lines, "pattern readwrite #", ""]))
        return f'[security]\nallow_anonymous = true\nacl_file = "{directory}/acl"\n'
    if feature.startswith("processes-"):
        return f"[server]\nprocesses = {feature.rpartition('-')[2]}\n"
    assert feature == "hooks"
    metadata = directory / "bench_hooks-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-hooks\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[holdfast.hooks]\nidle = bench_hooks:Idle\n")
    (directory / "bench_hooks.py").write_text(
        "from holdfast.hooks import Hooks\n\n\n"
        "class Idle(Hooks):\n"
        "    def authenticate(self, request):\n        return None\n\n"
        "    def authorise(self, client):\n        return None\n\n"
        "    def on_connect(self, client):\n        pass\n\n"
        "    def on_disconnect(self, client, reason):\n        pass\n\n"
        "    publish_filters = ['no/such/topic']\n\n"
        "    def on_publish(self, message):\n        pass\n"
    )
    return '[hooks]\nenabled = ["idle"]\n'
