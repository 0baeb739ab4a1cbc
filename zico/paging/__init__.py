"""Memory that leaves and comes back by page faults: the pager, and what a job needs next."""
