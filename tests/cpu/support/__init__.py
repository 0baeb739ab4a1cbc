"""Of the tests that start no process, and of others: jobs in one process, fakes, models, cases."""
