"""What the scheduler comes to in simulated time, beside others, by traces and by hand."""
