"""The deterministic simulation: virtual time, seeded order, many processes in one thread."""
