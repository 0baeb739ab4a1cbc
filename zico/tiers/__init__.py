"""Where bytes go that leave the budget: memory, files, compressed or encoded."""
