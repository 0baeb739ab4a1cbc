"""Jobs, memory and a clock in simulated time, driven by the scheduler's policies and the pool's rules."""
