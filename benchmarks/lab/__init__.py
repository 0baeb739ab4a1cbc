"""What measures Zico but is not Zico: published baselines that no command offers."""
