"""What server and sites say to each other: wire format, jobs, policies, the handshake."""
