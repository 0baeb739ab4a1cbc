"""Where tensors go, decided before they exist: ``Problem -> planner -> Plan -> judge``. Pure; knows no device."""
