"""One thin module per framework; installed as ``zico.adapters``."""
