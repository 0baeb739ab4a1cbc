"""The process that owns a pool, knows its jobs and decides who may begin an iteration."""
