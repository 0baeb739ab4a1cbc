"""What a job touches next, learned from its page faults: tables, prefetch, eviction. Knows no device and no kernel."""
