"""A process with the links of one node, which sends back what it gets.

    python -m tests.support.peer_process NODE_ID PORT PEER_ID=ADDRESS ...

It ends when its standard input is closed.
"""

import asyncio
import sys

from tests.support.peer_mesh import PeerNode, run


async def main() -> None:
    node_id, port, *peers = sys.argv[1:]
    node = PeerNode(node_id, port=int(port))
    node.answers = True
    await node.links.start()
    node.links.set_peers(dict(peer.split("=") for peer in peers))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await node.links.stop()


if __name__ == "__main__":
    run(main, timeout_s=110)
