"""What a cluster tells of adapters in JSON: for people to read."""
