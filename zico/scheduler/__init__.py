"""Who may start and who may grow: pure functions of a view of the pool, the same in broker and simulator."""
