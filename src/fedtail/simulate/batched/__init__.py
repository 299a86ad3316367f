"""The CPU's fast path: all clients and probes of a round in one captured step."""
