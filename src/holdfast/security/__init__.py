"""Identity and rights: passwords, ACL files, enhanced authentication, TLS, peer handshakes.

- Decides: who a client or a peer is, what an ACL allows, how two nodes prove that they belong
  together.
- Never: looks at messages. Which of a client's packets needs which right is `broker.rights`.
- Invariant: files are read when they are loaded; after that nothing here does I/O.
"""
