"""Of the tests that need a GPU."""
