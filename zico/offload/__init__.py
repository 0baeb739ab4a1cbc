"""Every byte outside the budget: tiers, the swapper, the pager, and what a job needs next."""
