"""Where tensors go: ``Problem -> planner -> Plan -> judge``."""
