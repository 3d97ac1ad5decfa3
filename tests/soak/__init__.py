"""``./justw soak``: a server under a seeded mix of clients and faults, and what it leaves."""
