"""What an iteration does to memory: curves, profiles and period detection. Knows no device, socket or framework."""
