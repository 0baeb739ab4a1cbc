"""Swap plans: what leaves memory around an iteration's peak and comes back in time. See docs/design/swap-plans.md."""
