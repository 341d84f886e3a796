"""Identity and rights: passwords, ACL files, enhanced authentication, TLS, peer handshakes.

- Decides: the identity of a client or a peer, the rights in an ACL, how two nodes prove that they
  belong together.
- Never: looks at messages. `node.rights` decides which right a client's packet needs.
- Invariant: files are read when they are loaded; after that no function here does I/O.
"""
