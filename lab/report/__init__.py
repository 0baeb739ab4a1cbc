"""Pictures and tables of plans and simulations."""
